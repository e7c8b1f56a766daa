"""Which layers may be without a gradient for a while because no input was routed to them."""

import re
from collections import defaultdict
from collections.abc import Sequence

ALIKE_AT_LEAST = 4
"""Layers of one size, within one block, whose names differ in a number alone: experts."""
_NAMED = re.compile(r"expert|(?:^|[._])moe(?:[._]|$)", re.IGNORECASE)
_NUMBER = re.compile(r"\d+")


def may_be_idle(names: Sequence[str], elements: Sequence[float]) -> frozenset[int]:
    """Return the indices of layers that are experts, by their names or because they are alike.

    Blocks of a model are alike as well, but not within another block: where a name has numbers
    after the first, one of these must be the one that differs.
    """
    found = {index for index, name in enumerate(names) if _NAMED.search(name)}
    families: dict[tuple[str, int, str, float], list[int]] = defaultdict(list)
    for index, name in enumerate(names):
        for number in list(_NUMBER.finditer(name))[1:]:
            before, after = name[: number.start()], name[number.end() :]
            families[before, number.start(), after, elements[index]].append(index)
    for alike in families.values():
        if len(alike) >= ALIKE_AT_LEAST:
            found.update(alike)
    return frozenset(found)
