"""In which format linear layers and convolutions ran, as the graph of a loss shows it.

No module has a hook for that: `torch.compile` would compile it again. Products in a compiled graph,
and in functions of the script's own, are not seen.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import torch

_INTERVAL_STEPS = 17
"""Prime, so that it does not always meet what a script does on every so many steps."""
_IN_DOUBT = 0.5
_NODES = 96
"""Nodes that are looked at; all up to `_NODES_IN_DOUBT` where most products there are in FP32."""
_NODES_IN_DOUBT = 4096
_PRODUCTS = frozenset(("AddmmBackward0", "ConvolutionBackward0", "LinearBackward0", "MmBackward0"))
"""Of linear layers and convolutions. Those of attention are in FP32 where its kernel wants them."""


def fp32_share_is_due(sequence: int) -> bool:
    """Return whether the products of step `sequence` are looked at."""
    return sequence % _INTERVAL_STEPS == 0


def fp32_share(roots: object) -> float | None:
    """Return the share of FP32 among the products that a loss was computed by, those of its end.

    Where most of them are, among all. None where no product is seen.
    """
    share = _share(roots, _NODES)
    if share is None or share <= _IN_DOUBT:
        return share
    return _share(roots, _NODES_IN_DOUBT)


def _share(roots: object, nodes: int) -> float | None:
    formats = [dtype is torch.float32 for dtype in _formats(_nodes(roots, nodes))]
    return sum(formats) / len(formats) if formats else None


def _formats(nodes: Iterable[Any]) -> Iterator[torch.dtype]:
    """Yield the formats of the results of products."""
    for node in nodes:
        if node.name() in _PRODUCTS and (made := getattr(node, "_input_metadata", None)):
            yield made[0].dtype


def _nodes(roots: object, at_most: int) -> Iterator[Any]:
    """Yield what a backward from `roots` will go through, along one path after the other."""
    listed = roots if isinstance(roots, list | tuple) else [roots]
    waiting = [node for each in listed if (node := getattr(each, "grad_fn", None)) is not None]
    seen = set(waiting)
    while waiting and len(seen) <= at_most:
        node = waiting.pop()
        yield node
        found = [each for each, _ in node.next_functions if each is not None and each not in seen]
        seen.update(found)
        waiting += found
