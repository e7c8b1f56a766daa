"""What the graph of a loss shows of how it was computed, before backward goes through it.

No module has a hook for that, since `torch.compile` would compile it again. What runs in a compiled
graph, or in functions of the script's own, is not seen.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from mp_agent.probe.scalars import Scalar, scalar_of
from mp_agent.records.columns import LOSS_IN_16_BITS, LOSS_INPUT_MISMATCH, TARGETS_BROADCAST

_PRODUCTS = frozenset(("AddmmBackward0", "ConvolutionBackward0", "LinearBackward0", "MmBackward0"))
"""Of linear layers and convolutions. Those of attention are in FP32 where its kernel wants them."""
_IN_DOUBT = 0.5
_NODES = 96
"""Nodes that are looked at; all up to `_NODES_IN_DOUBT` where most products there are in FP32."""
_NODES_IN_DOUBT = 4096


def fp32_share(roots: object) -> float | None:
    """Return the share of FP32 among the products that a loss was computed by, those of its end.

    Where most of them are, among all. None where no product is seen.
    """
    share = _share(roots, _NODES)
    if share is None or share <= _IN_DOUBT:
        return share
    return _share(roots, _NODES_IN_DOUBT)


def _share(roots: object, at_most: int) -> float | None:
    products = (node for node in _nodes(roots, at_most) if node.name() in _PRODUCTS)
    made = [found[0].dtype for node in products if (found := _results(node))]
    return sum(dtype is torch.float32 for dtype in made) / len(made) if made else None


def constant_factor(root: object) -> Scalar | None:
    """Return the constant that a product was multiplied by last; None where there is none.

    As in `(loss * 2 ** k).backward()`: of a hand-made loss scale nothing else is seen.
    """
    node = getattr(root, "grad_fn", None)
    if node is None or node.name() != "MulBackward0":
        return None
    operands = [each for each in (node._saved_self, node._saved_other) if each is not None]
    # Of two factors that both need gradients, both are saved.
    return scalar_of(operands[0]) if len(operands) == 1 else None


_LOSS_NODES = 48
"""Nodes next to a loss: those of its own computation, and a few more."""


def is_multiplied(roots: object) -> bool:
    """Return whether a loss was multiplied by a constant, as by a scaler, or by hand.

    By which is not read: that may call hooks on saved tensors, which compute them again.
    """
    return any(
        node.name() == "MulBackward0"
        and _shape_of(node) == ()
        and None in (each for each, _ in node.next_functions)
        for node in _nodes(roots, _LOSS_NODES, nearest_first=True)
    )


def mistakes_of(roots: object, *, scaled: bool = False) -> Mapping[str, Scalar]:
    """Return the columns of what is wrong in how a loss was computed from the model's outputs.

    scaled: a GradScaler has multiplied it last.
    """
    nodes = list(_nodes(roots, _LOSS_NODES, nearest_first=True))
    found: dict[str, Scalar] = {}
    if any(map(_has_other_input, nodes)):
        found[LOSS_INPUT_MISMATCH] = 1.0
    elif (negative := _is_negative(roots, scaled=scaled)) is not None:
        found[LOSS_INPUT_MISMATCH] = negative
    if any(map(_broadcasts_targets, nodes)):
        found[TARGETS_BROADCAST] = 1.0
    if _is_in_16_bits(nodes):
        found[LOSS_IN_16_BITS] = 1.0
    return found


_PROBABILITIES = frozenset(("SoftmaxBackward0", "SigmoidBackward0"))
_NO_LOGARITHMS = _PROBABILITIES | _PRODUCTS | {"ExpBackward0"}
_REJECTED = {
    "LogSoftmaxBackward0": _PROBABILITIES,
    "BinaryCrossEntropyWithLogitsBackward0": _PROBABILITIES,
    "NllLossBackward0": _NO_LOGARITHMS,
    "NllLoss2DBackward0": _NO_LOGARITHMS,
}
"""What none of these loss functions, or parts of them, is meant to be given."""
_SAME_NUMBERS = frozenset(
    f"{name}Backward{variant}"
    for name in (
        *("Alias", "Clone", "_DDPSink", "Index", "Permute", "ReshapeAlias", "Select", "Slice"),
        *("Squeeze", "ToCopy", "Transpose", "UnsafeView", "View"),
    )
    for variant in ("0", "1", "")
)
"""What selects, arranges or casts numbers."""
_REDUCED = frozenset(("MeanBackward0", "SumBackward0"))


def _has_other_input(node: Any) -> bool:
    """Return whether a loss function was given probabilities for logits, or similar."""
    name = node.name()
    if name in _REJECTED:
        return _name_of_source(node, 0) in _REJECTED[name]
    if name not in _REDUCED:
        return False
    # As kl_div computes it: target * log(target) - target * input, where only the input needs
    # gradients.
    return (
        (difference := _next(node, 0)) is not None
        and difference.name() == "SubBackward0"
        and _next(difference, 0) is None
        and (product := _next(difference, 1)) is not None
        and product.name() == "MulBackward0"
        and _next(product, 0) is None
        and _name_of_source(product, 1) == "SoftmaxBackward0"
    )


_LOSS_FUNCTIONS = frozenset(
    f"{name}Backward0"
    for name in (
        *("BinaryCrossEntropy", "BinaryCrossEntropyWithLogits", "HuberLoss", "LogSoftmax"),
        *("MseLoss", "NllLoss", "NllLoss2D", "SmoothL1Loss"),
    )
)
_SIXTEEN_BITS = (torch.bfloat16, torch.float16)


def _is_in_16_bits(nodes: Sequence[Any]) -> bool:
    """Return whether a loss function is computed in 16 bits; without one, what reduces the loss."""
    functions = [node for node in nodes if node.name() in _LOSS_FUNCTIONS]
    if not functions:
        functions = [node for node in nodes if node.name() in _REDUCED][:1]
    made = (_results(node) for node in functions)
    return any(each and each[0].dtype in _SIXTEEN_BITS for each in made)


_NEVER_NEGATIVE = frozenset(
    (
        *("BinaryCrossEntropyWithLogitsBackward0", "BinaryCrossEntropyBackward0"),
        *("NllLossBackward0", "NllLoss2DBackward0"),
    )
)
_BELOW_0 = -1e-3
"""Further below 0 than a loss of 0 may be by rounding."""


def _is_negative(roots: object, *, scaled: bool) -> Scalar | None:
    """Return 1 of a cross-entropy below 0, as of masks up to 255; on a device 1 or 0; else None.

    One that is divided by constants counts; one that they multiply may be maximized.
    """
    root = roots[0] if isinstance(roots, list | tuple) and len(roots) == 1 else roots
    node = getattr(root, "grad_fn", None)
    if node is not None and scaled and node.name() == "MulBackward0":
        node = _next(node, 0)
    while node is not None and node.name() == "DivBackward0":
        node = _next(node, 0)
    loss = scalar_of(root)
    if node is None or node.name() not in _NEVER_NEGATIVE or loss is None:
        return None
    if isinstance(loss, torch.Tensor):
        return scalar_of((loss < _BELOW_0).double())
    return 1.0 if loss < _BELOW_0 else None


_ELEMENTWISE_LOSSES = frozenset(
    ("MseLossBackward0", "SmoothL1LossBackward0", "HuberLossBackward0", "SubBackward0")
)


def _broadcasts_targets(node: Any) -> bool:
    """Return whether outputs [B, 1] are compared with targets [B], which makes [B, B] of them.

    Or outputs [B] with targets [B, 1], by one of torch's functions, which expand both first. Where
    outputs were given their shape by `unsqueeze`, or None as an index, all pairs are compared on
    purpose.
    """
    if node.name() not in _ELEMENTWISE_LOSSES:
        return False
    operands = [each for each, _ in node.next_functions]
    outputs = [each for each in operands if each is not None]
    if len(operands) != 2 or len(outputs) != 1:
        return False
    source, expanded = outputs[0], None
    while source is not None and source.name() in ("ToCopyBackward0", "ExpandBackward0"):
        if source.name() == "ExpandBackward0":
            expanded = _shape_of(source)
        source = _next(source, 0)
    if source is None or source.name() == "UnsqueezeBackward0":
        return False
    made, given = expanded or _shape_of(node), _shape_of(source)
    rows = made[0] if made and len(made) == 2 else 0
    is_column = given == (rows, 1) or (expanded is not None and given == (rows,))
    return rows > 1 and made == (rows, rows) and is_column


def _shape_of(node: Any) -> tuple[int, ...] | None:
    found = _results(node)
    return tuple(found[0].shape) if found else None


def _results(node: Any) -> Any:
    """Return what torch knows of the tensors that a node has made; not of those of all nodes."""
    return getattr(node, "_input_metadata", None)


def _next(node: Any, place: int) -> Any:
    found = node.next_functions
    return found[place][0] if place < len(found) else None


def _name_of_source(node: Any, place: int) -> str:
    """Return the name of what has computed the numbers that a node was given at a place."""
    source = _next(node, place)
    while source is not None and source.name() in _SAME_NUMBERS:
        source = _next(source, 0)
    return "" if source is None else str(source.name())


def _nodes(roots: object, at_most: int, *, nearest_first: bool = False) -> Iterator[Any]:
    """Yield what a backward from `roots` will go through, along one path after the other.

    nearest_first: in the order of the distance from them, in place of that.
    """
    listed = roots if isinstance(roots, list | tuple) else [roots]
    waiting = [node for each in listed if (node := getattr(each, "grad_fn", None)) is not None]
    seen = set(waiting)
    while waiting and len(seen) <= at_most:
        node = waiting.pop(0 if nearest_first else -1)
        yield node
        found = [each for each, _ in node.next_functions if each is not None and each not in seen]
        seen.update(found)
        waiting += found
