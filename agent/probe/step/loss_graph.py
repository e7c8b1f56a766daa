"""What the graph of a loss shows of how it was computed, before backward goes through it.

No module has a hook for that, since `torch.compile` would compile it again. What runs in a compiled
graph, or in functions of the script's own, is not seen.
"""

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import torch

from mp_agent.probe.scalars import Scalar, scalar_of
from mp_agent.records.columns import LOSS_IN_16_BITS, LOSS_INPUT_MISMATCH, TARGETS_BROADCAST

LOOK_INTERVAL_STEPS = 17
"""Prime, so that it does not always meet what a script does on every so many steps."""
PRODUCTS = frozenset(("AddmmBackward0", "ConvolutionBackward0", "LinearBackward0", "MmBackward0"))
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
    made = list(_product_formats(roots, at_most))
    return sum(dtype is torch.float32 for dtype in made) / len(made) if made else None


def _product_formats(roots: object, at_most: int) -> Iterator[torch.dtype]:
    """Yield the formats of the results of products."""
    for node in _nodes(roots, at_most):
        if node.name() in PRODUCTS and (made := _results(node)):
            yield made[0].dtype


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


def is_scaled(roots: object) -> bool:
    """Return whether a loss was multiplied by a constant last, as by a scaler, or by hand.

    By which is not read: that may call hooks on saved tensors, which compute them again.
    """
    return any(map(_is_multiplied, roots if isinstance(roots, list | tuple) else [roots]))


def _is_multiplied(root: object) -> bool:
    node = getattr(root, "grad_fn", None)
    while node is not None and node.name() == "DivBackward0" and _has_constant(node):
        node = next_node(node, 0)
    return node is not None and node.name() == "MulBackward0" and _has_constant(node)


def _has_constant(node: Any) -> bool:
    return None in (each for each, _ in node.next_functions)


def has_fp16_products(roots: object) -> bool:
    """Return whether any product near the end of what a loss was computed by is in FP16."""
    return any(dtype is torch.float16 for dtype in _product_formats(roots, _NODES))


_LOSS_NODES = 48
"""Nodes next to a loss: those of its own computation, and a few more."""


def mistakes_of(
    roots: object, *, scaled: bool = False, autocast: bool = False
) -> Mapping[str, Scalar]:
    """Return the columns of what is wrong in how a loss was computed from the model's outputs.

    scaled: a GradScaler has multiplied it last. autocast: it is on in the step.
    """
    users: dict[Any, Any] = {}
    nodes = nodes_near(roots, users)
    loss, first = scalar_of(_single(roots)), _first_term(roots, scaled=scaled)
    found: dict[str, Scalar] = {}
    if any(_has_other_input(node, nodes) for node in nodes) or _is_over_other_dimension(nodes):
        found[LOSS_INPUT_MISMATCH] = 1.0
    elif first is not None and (negative := _is_negative(loss, first)) is not None:
        found[LOSS_INPUT_MISMATCH] = negative
    elif any(node is not first and _is_divergence_of_softmax(node) for node in nodes):
        found[LOSS_INPUT_MISMATCH] = 1.0
    if any(_broadcasts_targets(node, users) for node in nodes) and not any(
        map(_is_of_pairs, nodes)
    ):
        found[TARGETS_BROADCAST] = 1.0
    if _is_in_16_bits(nodes, autocast=autocast):
        found[LOSS_IN_16_BITS] = 1.0
    return found


def nodes_near(roots: object, users: MutableMapping[Any, Any] | None = None) -> Sequence[Any]:
    """Return the nodes next to a loss; fill `users`: by node, what has used its result."""
    return list(_nodes(roots, _LOSS_NODES, {} if users is None else users))


_SOFTMAX = ("SoftmaxBackward0",)
_PROBABILITIES = frozenset((*_SOFTMAX, "SigmoidBackward0"))
_NO_LOGARITHMS = _PROBABILITIES | PRODUCTS | {"ExpBackward0"}
_REJECTED = {
    "LogSoftmaxBackward0": _PROBABILITIES,
    "BinaryCrossEntropyWithLogitsBackward0": _PROBABILITIES,
    "NllLossBackward0": _NO_LOGARITHMS,
    "NllLoss2DBackward0": _NO_LOGARITHMS,
}
"""What none of these loss functions, or parts of them, is meant to be given."""
SAME_NUMBERS = frozenset(
    f"{name}Backward{variant}"
    for name in (
        *("Alias", "Clone", "_DDPSink", "Index", "Permute", "ReshapeAlias", "Select", "Slice"),
        *("Squeeze", "ToCopy", "Transpose", "UnsafeView", "View"),
    )
    for variant in ("0", "1", "")
)
"""What selects, arranges or casts numbers."""
_CLAMPED = ("ClampBackward0", "ClampBackward1", "ClampMinBackward0")
_REDUCED = frozenset(("MeanBackward0", "SumBackward0"))


def _has_other_input(node: Any, nodes: Sequence[Any]) -> bool:
    """Return whether a loss function was given probabilities for logits, or similar."""
    name = node.name()
    if name not in _REJECTED:
        return False
    source = _name_of_source(node, 0)
    # Next to logsumexp, nll_loss gathers the scores of the targets: both are cross-entropy.
    gathers = source in PRODUCTS and any(each.name() == "LogsumexpBackward0" for each in nodes)
    by_hand = name == "LogSoftmaxBackward0" and _is_softmax_by_hand(next_node(node, 0), node)
    return by_hand or (source in _REJECTED[name] and not gathers)


def _is_softmax_by_hand(node: Any, softmax: Any) -> bool:
    """Return whether exponentials are divided by their sum along the dimension of `softmax`."""
    if node is None or node.name() != "DivBackward0":
        return False
    exponentials, total = next_node(node, 0), next_node(node, 1)
    if total is not None and total.name() in ("UnsqueezeBackward0", "ExpandBackward0"):
        total = next_node(total, 0)
    if total is None or exponentials is None or total.name() != "SumBackward1":
        return False
    of_sum, rank = next_node(total, 0), len(_shape_of(node) or ())
    same = of_sum is exponentials or (
        of_sum is not None
        and of_sum.name() == exponentials.name()
        and next_node(of_sum, 0) is next_node(exponentials, 0)
    )
    dimensions = [_wrapped(each, rank) for each in total._saved_dim or ()]
    return (
        same
        and exponentials.name() == "ExpBackward0"
        and dimensions == [_wrapped(softmax._saved_dim, rank)]
    )


LIKELIHOODS = ("NllLossBackward0", "NllLoss2DBackward0")
"""The nodes of a cross-entropy that have its targets."""
_ARRANGED = ("ReshapeAliasBackward0", "UnsafeViewBackward0", "ViewBackward0")


def _is_over_other_dimension(nodes: Sequence[Any]) -> bool:
    """Return whether nll_loss is given what a softmax makes along another dimension than classes'.

    Not next to one along that of the classes: a loss over pairs may go both ways.
    """
    found = [other for node in nodes if (other := _over_other_dimension(node)) is not None]
    return bool(found) and all(found)


def _over_other_dimension(node: Any) -> bool | None:
    """Return it of one loss function; None where that is not known.

    Of as many samples as classes a softmax along the samples may be meant: each is compared with
    all others.
    """
    if node.name() not in LIKELIHOODS or (source := next_node(node, 0)) is None:
        return None
    shape = _shape_of(source) or ()
    classes = min(1, len(shape) - 1)
    if source.name() in _ARRANGED and (source := next_node(source, 0)) is not None:
        whole, shape = shape, _shape_of(source) or ()
        if len(shape) < 3 or whole not in ((*shape[:2], 1, *shape[2:]), (*whole[:1], shape[-1])):
            return None
        classes = 1 if len(whole) > 2 else len(shape) - 1  # one that torch has added, or flattened
    if source is not None and source.name() == "LogBackward0":
        source = next_node(source, 0)
    if source is None or source.name() not in ("LogSoftmaxBackward0", *_SOFTMAX):
        return None
    if not shape:
        return None
    along = _wrapped(source._saved_dim, len(shape))
    return along != classes and shape[along] != shape[classes]


def _wrapped(dimension: int, rank: int) -> int:
    """Return which one a dimension is that torch has kept without its sign."""
    return (dimension - 2**64 if dimension >= 2**63 else dimension) % max(rank, 1)


def _is_divergence_of_softmax(node: Any) -> bool:
    """Return whether kl_div was given probabilities: target * log(target) - target * input.

    Only the input needs gradients.
    """
    difference = next_node(node, 0) if node.name() in _REDUCED else None
    if difference is None or difference.name() != "SubBackward0" or next_node(difference, 0):
        return False
    product = next_node(difference, 1)
    is_product = product is not None and product.name() == "MulBackward0"
    return is_product and not next_node(product, 0) and _name_of_source(product, 1) in _SOFTMAX


_LOSS_FUNCTIONS = frozenset(
    f"{name}Backward0"
    for name in (
        *("BinaryCrossEntropy", "BinaryCrossEntropyWithLogits", "HuberLoss", "LogSoftmax"),
        *("MseLoss", "NllLoss", "NllLoss2D", "SmoothL1Loss"),
    )
)
_SIXTEEN_BITS = (torch.bfloat16, torch.float16)


def _is_in_16_bits(nodes: Sequence[Any], *, autocast: bool) -> bool:
    """Return whether a loss function is computed in 16 bits; without one, what reduces the loss.

    Autocast decides itself in which format a mean is computed, as that of a critic's outputs.
    """
    functions = [node for node in nodes if node.name() in _LOSS_FUNCTIONS]
    if not functions and not autocast:
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


def _first_term(roots: object, *, scaled: bool) -> Any:
    """Return what has made a loss, before constants divided it, and a scaler multiplied it."""
    node = getattr(_single(roots), "grad_fn", None)
    if node is not None and scaled and node.name() == "MulBackward0":
        node = next_node(node, 0)
    while node is not None and node.name() == "DivBackward0":
        node = next_node(node, 0)
    return node


def _is_negative(loss: Scalar | None, first: Any) -> Scalar | None:
    """Return 1 of a cross-entropy below 0, as of masks up to 255; on a device 1 or 0; else None.

    One that is multiplied by constants may be maximized, and does not count. What looks like
    kl_div, and is not negative, is another expectation.
    """
    divergence = _is_divergence_of_softmax(first)
    if loss is None or not (divergence or first.name() in _NEVER_NEGATIVE):
        return None
    if isinstance(loss, torch.Tensor):
        return scalar_of((loss < _BELOW_0).double())
    return 1.0 if loss < _BELOW_0 else None


_DIFFERENCES = frozenset(
    ("MseLossBackward0", "SmoothL1LossBackward0", "HuberLossBackward0", "SubBackward0")
)
_FACTORS = frozenset(("DivBackward0", "MulBackward0"))
_OF_PAIRS = frozenset(
    f"{name}Backward{variant}"
    for name in (
        *("Amax", "Amin", "Clamp", "ClampMin", "Exp", "Gather", "Index", "LogSigmoid"),
        *("LogSoftmax", "Logsumexp", "Max", "Min", "Relu", "Select", "Sigmoid", "Slice"),
        *("Softmax", "Softplus", "Sort", "Tanh", "Topk"),
    )
    for variant in (0, 1)
)
"""What losses over pairs apply to their differences: kernels, ranking, transport, choices."""
_LOSS_ARITHMETIC = frozenset(
    f"{name}Backward{variant}"
    for name in (
        *("Abs", "Add", "Div", "Maximum", "Mean", "Minimum", "Mul", "Neg", "Pow", "Rsub", "Sub"),
        "Sum",
    )
    for variant in (0, 1)
)
_DIMENSION_LOST = frozenset(
    f"{name}Backward{variant}"
    for name in ("ReshapeAlias", "Select", "Squeeze", "View")
    for variant in (0, 1, 2)
)


def _broadcasts_targets(node: Any, users: Mapping[Any, Any]) -> bool:
    """Return whether outputs [B, 1] are compared with targets [B], which makes [B, B] of them.

    Or outputs [B], which have lost a dimension or were expanded by one of torch's functions, with
    targets [B, 1]; the same of maps, as [B, 1, H, W] and [B, H, W], and of products, as of losses
    and weights. Where outputs were given their shape by `unsqueeze`, or None as an index, all
    pairs are compared on purpose. users: by node, what has used its result.
    """
    if node.name() not in _DIFFERENCES and node.name() not in _FACTORS:
        return False
    operands = [each for each, _ in node.next_functions]
    outputs = [each for each in operands if each is not None]
    if len(operands) != 2 or len(outputs) != 1:
        return False
    source, expanded = outputs[0], None
    while source is not None and source.name() in ("ToCopyBackward0", "ExpandBackward0"):
        if source.name() == "ExpandBackward0":
            expanded = _shape_of(source)
        source = next_node(source, 0)
    # A parameter is no output: it may weight the columns of a matrix.
    if source is None or source.name() in ("UnsqueezeBackward0", "torch::autograd::AccumulateGrad"):
        return False
    made, given = expanded or _shape_of(node) or (), _shape_of(source)
    rows, columns, rest = made[:1], made[1:2], made[2:]
    if len(made) < 2 or rows != columns or rows == (1,):
        return False
    lost_dimension = expanded is not None or source.name() in _DIMENSION_LOST
    fits = given == (*rows, 1, *rest) or (lost_dimension and given == (*rows, *rest))
    later = list(_users_of(node, users))
    # Within a model, a batch may have as many rows as there are heads, or frequencies.
    if rest or node.name() in _FACTORS:
        return fits and _LOSS_ARITHMETIC.issuperset(later)
    return fits and _OF_PAIRS.isdisjoint(later)


def _users_of(node: Any, users: Mapping[Any, Any]) -> Iterator[str]:
    """Yield the names of what has used the result of a node, and the results of that."""
    while (node := users.get(node)) is not None:
        yield node.name()


def _is_of_pairs(node: Any) -> bool:
    """Return whether all outputs are compared with each other, as in an energy distance."""
    shape = _shape_of(node) if node.name() == "SubBackward0" else None
    both = shape is not None and not _has_constant(node)
    return both and len(shape or ()) == 2 and len(set(shape or ())) == 1


def _shape_of(node: Any) -> tuple[int, ...] | None:
    found = _results(node)
    return tuple(found[0].shape) if found else None


def saved(node: Any, name: str) -> torch.Tensor | None:
    """Return a tensor that a node has kept; None if a hook would bring, or compute, it again.

    Nor one that an earlier backward has freed. Nothing is caught here: a signal handler of the
    script's may raise the same.
    """
    kept = getattr(node, f"_raw_saved_{name}", None)
    if kept is None or getattr(kept, "unpack_hook", kept) is not None:
        return None
    found = kept.data
    return found if type(found) is torch.Tensor else None  # no part of one on many ranks


def _results(node: Any) -> Any:
    """Return what torch knows of the tensors that a node has made; not of those of all nodes."""
    return getattr(node, "_input_metadata", None)


def next_node(node: Any, place: int) -> Any:
    """Return what has made the operand at a place; None of a constant."""
    found = node.next_functions
    return found[place][0] if place < len(found) else None


def _name_of_source(node: Any, place: int) -> str:
    """Return the name of what has computed the numbers that a node was given at a place."""
    source = next_node(node, place)
    while source is not None and source.name() in SAME_NUMBERS:
        source = next_node(source, 0)
    name = "" if source is None else str(source.name())
    if name in _CLAMPED and (clamped := _name_of_source(source, 0)) in _PROBABILITIES:
        return clamped
    return name


def _single(roots: object) -> object:
    return roots[0] if isinstance(roots, list | tuple) and len(roots) == 1 else roots


def _nodes(
    roots: object, at_most: int, users: MutableMapping[Any, Any] | None = None
) -> Iterator[Any]:
    """Yield what a backward from `roots` will go through, along one path after the other.

    users: where given, in the order of the distance from them in place of that, and filled: by
    node, what has used its result.
    """
    listed = roots if isinstance(roots, list | tuple) else [roots]
    waiting = [node for each in listed if (node := getattr(each, "grad_fn", None)) is not None]
    seen = set(waiting)
    while waiting and len(seen) <= at_most:
        node = waiting.pop(-1 if users is None else 0)
        yield node
        found = [each for each, _ in node.next_functions if each is not None and each not in seen]
        seen.update(found)
        waiting += found
        if users is not None:
            users.update(dict.fromkeys(found, node))
