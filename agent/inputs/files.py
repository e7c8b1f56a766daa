"""Files and text of unknown origin: regular files alone, up to a size, in the encodings of logs."""

import codecs
import errno
import io
import json
import os
import resource
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from mp_agent.errors import SourceError

TEXT_BYTES_MAX = 256 << 20
"""Most bytes of a text that is read as a whole."""
STREAM_BYTES_MAX = 4 << 30
"""Most bytes of a file that is read piece by piece."""

_MARKS = (
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
"""Those that begin like another one after it."""
_UNMARKED_BYTES = 64


def open_regular(path: str | Path, bytes_max: int = STREAM_BYTES_MAX) -> BinaryIO:
    """Return a regular file of at most `bytes_max`, opened for reading.

    Opening never waits, as it would for a pipe. Raises OSError, also for what is no such file.
    """
    if not stat.S_ISREG(os.stat(path).st_mode):
        # Before opening it: that alone may have an effect on a device.
        raise _not_regular(path)
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    file = os.fdopen(fd, "rb")
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise _not_regular(path)
        if status.st_size > bytes_max:
            raise _too_large(path, status.st_size, bytes_max)
    except BaseException:
        file.close()
        raise
    return file


def read_file(path: str | Path, bytes_max: int = TEXT_BYTES_MAX) -> bytes:
    """Return what a regular file holds. Raises OSError, also for one that is too large."""
    with open_regular(path, bytes_max) as file:
        content = file.read(bytes_max + 1)
    if len(content) > bytes_max:
        # It has grown since, or is one of the kernel's, whose size is 0.
        raise _too_large(path, len(content), bytes_max)
    return content


def read_text(path: str | Path, bytes_max: int = TEXT_BYTES_MAX) -> str:
    """Return what a regular file holds as text; bytes of no character are replaced.

    Raises OSError, also for one that is too large.
    """
    content = read_file(path, bytes_max)
    return content.decode(encoding_of(content), "replace")


def read_lines(path: str | Path, characters_max: int) -> Iterator[tuple[int, str]]:
    """Yield number and text of each line, without its end; longer ones are left out.

    Never holds more than a line of that length. Raises OSError.
    """
    with open_regular(path) as file:
        encoding = encoding_of(file.read(_UNMARKED_BYTES))
        file.seek(0)
        lines = io.TextIOWrapper(file, encoding, errors="replace", newline="\n")
        number, whole = 1, True
        while line := lines.readline(characters_max):
            ended = line.endswith("\n")
            if whole and (ended or len(line) < characters_max):
                yield number, line.removesuffix("\n").removesuffix("\r")
            whole = ended
            number += ended


def check_text(path: str | Path) -> None:
    """Raise ValueError for a file that begins as no text does, such as a compressed one.

    Raises OSError for what `open_regular` refuses.
    """
    with open_regular(path) as file:
        head = file.read(_UNMARKED_BYTES)
    encoding = encoding_of(head)
    decoder = codecs.getincrementaldecoder(encoding)()
    try:
        is_text = "\0" not in decoder.decode(head)
    except UnicodeDecodeError:
        is_text = False
    if not is_text:
        raise ValueError("is no text: is it compressed?")


def encoding_of(head: bytes) -> str:
    """Return the encoding of a text that begins with these bytes: UTF-8 unless they show another.

    Windows' shells write UTF-16, with a byte order mark or without.
    """
    for mark, encoding in _MARKS:
        if head.startswith(mark):
            return encoding
    begin = head[:_UNMARKED_BYTES]
    if len(begin) >= 4:
        if not any(begin[1::2]) and all(begin[0::2]):
            return "utf-16-le"
        if not any(begin[0::2]) and all(begin[1::2]):
            return "utf-16-be"
    return "utf-8"


def _not_regular(path: str | Path) -> OSError:
    return OSError(errno.EINVAL, "not a regular file", str(path))


def _too_large(path: str | Path, size: int, bytes_max: int) -> OSError:
    return OSError(errno.EFBIG, f"holds {size} bytes, more than {bytes_max}", str(path))


VALUES_MAX = 20_000_000
"""Most values of one text; each takes up to 100 bytes of memory."""


def printable(text: str, *, keep: str = "") -> str:
    """Return text on one line, with escapes for what a terminal or a file would interpret.

    keep: characters that stay, such as line ends.
    """
    if text.isprintable():
        return text
    return "".join(
        one if one.isprintable() or one in keep else one.encode("unicode_escape").decode("ascii")
        for one in text
    )


def bounded_values(text: str, separators: str) -> str:
    """Return a text that holds at most `VALUES_MAX` values. Raises SourceError for any other.

    separators: characters of which one precedes every value but the first.
    """
    count = sum(map(text.count, separators))
    if count > VALUES_MAX:
        raise SourceError(f"holds {count} values, more than {VALUES_MAX}")
    return text


def parse_json(text: str) -> Any:
    """Return the value that a JSON text holds; NaN and Infinity may be literals in it.

    Raises SourceError, naming where it breaks off.
    """
    try:
        return json.loads(bounded_values(text, ",[{"))
    except json.JSONDecodeError as error:
        place = f"line {error.lineno} column {error.colno}"
        raise SourceError(f"{place}: is no JSON: {error.msg}") from None
    except RecursionError:
        raise SourceError("the JSON is nested too deeply") from None
    except ValueError:
        raise SourceError("the JSON holds an integer of too many digits") from None


def parse_yaml_texts(text: str) -> Any:
    """Return what a YAML text holds, with every scalar as text.

    Raises SourceError, naming the place; also for an alias, of which a few lines can make a
    document without end.
    """
    import yaml  # kept out of the memory of node agents, which read none

    class Loader(yaml.BaseLoader):
        def compose_node(self, parent: Any, index: Any) -> Any:
            if self.check_event(yaml.AliasEvent):
                parser: Any = self
                mark = parser.peek_event().start_mark
                raise SourceError(f"line {mark.line + 1}: aliases are not read")
            return super().compose_node(parent, index)

    try:
        return yaml.load(text, Loader=Loader)
    except RecursionError:
        raise SourceError("the YAML is nested too deeply") from None
    except (yaml.YAMLError, ValueError) as error:
        mark = getattr(error, "problem_mark", None)
        place = "" if mark is None else f"line {mark.line + 1}: "
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise SourceError(f"{place}is no YAML: {problem}") from None


def limit_resources(*, niceness: int, cpu_seconds: int, memory_bytes: int) -> None:
    """Leave the processors to a training on the node, and end this process if it takes too much."""
    os.nice(niceness)
    for kind, wanted in (
        (resource.RLIMIT_CPU, cpu_seconds),
        (resource.RLIMIT_AS, memory_bytes),
        (resource.RLIMIT_CORE, 0),
    ):
        _, hard = resource.getrlimit(kind)
        allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(kind, (allowed, hard))


def as_utf8(name: str) -> str:
    """Return a name that can be written as UTF-8: lone surrogates become question marks."""
    return name if name.isascii() else name.encode("utf-8", "replace").decode("utf-8")
