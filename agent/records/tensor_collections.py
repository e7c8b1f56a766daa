"""Groups of parameters by name, and how a script's slices of tensors are compared.

A ratio and the index of the slice at fault, in one float64 that a maximum can be taken of.
The index is in the low bits of the fraction, so that the larger ratio is the larger number and
brings its own index with it; of equal ratios the higher index is taken. The ratio keeps 32 bits of
its fraction.

Named groups of parameters: how a script defines one, and which layers are in it.
The definitions travel as a fact of the schema; where layers are merged, members are found by name.
"""

import re
import struct
from collections.abc import Iterable, Sequence
from functools import lru_cache

import msgspec
from msgspec import Struct

from mp_agent.errors import SettingError

INDEX_BITS = 20
SLICES_AT_MOST = 1 << INDEX_BITS
"""Most slices along one dimension."""
_INDEX_MASK = SLICES_AT_MOST - 1


def packed(ratio: float, index: int) -> float:
    """Return both as one number; ratio: finite and above 0. index: below `SLICES_AT_MOST`."""
    (bits,) = struct.unpack("<q", struct.pack("<d", ratio))
    return _number(bits & ~_INDEX_MASK | index)


def ratio_of(value: float) -> float:
    """Return the ratio, to 32 bits of its fraction."""
    return packed(value, 0)


def index_of(value: float) -> int:
    """Return the index of the slice."""
    (bits,) = struct.unpack("<q", struct.pack("<d", value))
    return int(bits & _INDEX_MASK)


def _number(bits: int) -> float:
    (value,) = struct.unpack("<d", struct.pack("<q", bits))
    return float(value)


FACT = "collections"
"""The fact of a schema that holds the definitions, as JSON."""
COLLECTIONS_AT_MOST = 64
"""Most collections in one run; each has a series of every metric of collections."""
NAME_CHARACTERS_AT_MOST = 128
PATTERNS_AT_MOST = 64
PATTERN_CHARACTERS_AT_MOST = 1024


class TensorCollection(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A group of parameters: its name, and the patterns of which one is in each member's name."""

    name: str
    patterns: tuple[str, ...]


def make_collection(name: object, include: object) -> TensorCollection:
    """Return the collection of the parameters in whose name one of the patterns is found.

    Raises SettingError, naming the argument and its value, for what is no name or no pattern.
    """
    return TensorCollection(_checked_name(name), _checked_patterns(include))


def encode_collections(collections: Iterable[TensorCollection]) -> str:
    """Return the definitions as the value of a fact; "" for none."""
    found = tuple(collections)
    return msgspec.json.encode(found).decode() if found else ""


@lru_cache(maxsize=64)
def decode_collections(fact: str) -> tuple[TensorCollection, ...]:
    """Return the definitions in the value of a fact; none where it cannot be read."""
    try:
        return msgspec.json.decode(fact, type=tuple[TensorCollection, ...]) if fact else ()
    except msgspec.DecodeError:
        return ()


@lru_cache(maxsize=4 * COLLECTIONS_AT_MOST)
def members_of(patterns: tuple[str, ...], layers: tuple[str, ...]) -> tuple[int, ...]:
    """Return which layers are members, as indices in ascending order.

    What follows `@` in a layer's label is no part of its name. A pattern that this Python cannot
    read has no members.
    """
    searches = [found.search for pattern in patterns if (found := _compiled(pattern))]
    names = [layer.partition("@")[0] for layer in layers]
    return tuple(
        index for index, name in enumerate(names) if any(search(name) for search in searches)
    )


def _compiled(pattern: str) -> "re.Pattern[str] | None":
    try:
        return re.compile(pattern)
    except (re.error, RecursionError, OverflowError):
        return None


def _checked_name(name: object) -> str:
    if not isinstance(name, str):
        raise _problem("name", name, "must be text")
    if not 0 < len(name) <= NAME_CHARACTERS_AT_MOST:
        raise _problem("name", name, f"must have 1 to {NAME_CHARACTERS_AT_MOST} characters")
    if not name.isprintable() or name != name.strip():
        raise _problem("name", name, "becomes a label: it must be printable, without outer spaces")
    return name


def _checked_patterns(include: object) -> tuple[str, ...]:
    patterns: Sequence[object]
    if isinstance(include, str):
        patterns = (include,)
    elif isinstance(include, (list, tuple)):
        patterns = include
    else:
        raise _problem(
            "include", include, "must be the text of a regular expression, or a list of such texts"
        )
    if not 0 < len(patterns) <= PATTERNS_AT_MOST:
        raise _problem("include", include, f"must hold 1 to {PATTERNS_AT_MOST} regular expressions")
    return tuple(_checked_pattern(pattern) for pattern in patterns)


def _checked_pattern(pattern: object) -> str:
    if not isinstance(pattern, str):
        raise _problem("include", pattern, "must be text")
    if not 0 < len(pattern) <= PATTERN_CHARACTERS_AT_MOST:
        raise _problem(
            "include", pattern, f"must have 1 to {PATTERN_CHARACTERS_AT_MOST} characters"
        )
    try:
        pattern.encode()
        re.compile(pattern)
    except (re.error, RecursionError, OverflowError, UnicodeEncodeError) as error:
        raise _problem("include", pattern, f"is no regular expression: {error}") from error
    return pattern


def _problem(argument: str, value: object, what: str) -> SettingError:
    return SettingError(f"{argument} has value {value!r}: {what}")
