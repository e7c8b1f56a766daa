"""Calls of attention, the logits of attention and of the output layer, and which tokens it sees."""

import pkgutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import update_wrapper
from math import nan, sqrt
from types import CodeType, FrameType, ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import has_torch_function

from mp_agent.probe.step.loss_graph import PRODUCTS, SAME_NUMBERS, next_node, saved

Seen = Callable[[FrameType, Sequence[Any], Mapping[str, Any]], None]
"""Called after a call, with the frame of the caller and the arguments."""

_Place = tuple[dict[str, Any], str, Any, Any]
"""A namespace, a key in it, the function that was there, and what stands in for it."""

_RUN_OF_MODULE: CodeType = nn.Module._call_impl.__code__


class _Call:
    """A function that reports its calls; equal to it, and a copy, pickled or deep, is it itself."""

    def __init__(
        self,
        name: str,
        function: Callable[..., Any],
        seen: Seen,
        restored: Callable[["_Call"], AbstractContextManager[None]],
    ) -> None:
        """restored: a context in which the function is in its places again."""
        update_wrapper(self, function)
        self._name, self._function, self._seen, self._restored = name, function, seen, restored

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or torch._C._get_tracing_state():
            return self._function(*args, **kwargs)
        if has_torch_function((*args, *kwargs.values())):
            # A `__torch_function__` finds out by identity which function it is called for.
            with self._restored(self):
                result = self._function(*args, **kwargs)
        else:
            result = self._function(*args, **kwargs)
        self._seen(sys._getframe(1), args, kwargs)
        return result

    def __eq__(self, other: object) -> bool:
        return self is other or self._function is other

    def __hash__(self) -> int:
        return hash(self._function)

    def __reduce__(self) -> tuple[Any, ...]:
        # Of the standard library alone: what is saved must load where mp_agent is not installed.
        return pkgutil.resolve_name, (f"torch.nn.functional:{self._name}",)


class FunctionCalls:
    """Reports calls of some functions of `torch.nn.functional` between `begin` and `end`.

    Reaches callers who imported a function by name before: in any module under its own name, and
    under any name where the forward of a model's module looks it up. Not a function that is kept
    elsewhere, such as in an attribute.
    """

    def __init__(self) -> None:
        self._replaced: list[_Place] = []

    def begin(self, seen: Mapping[str, Seen], model: nn.Module) -> None:
        """Replace the functions; `seen` says by name what is called after each call."""
        self.end()
        functions = {name: vars(F)[name] for name in seen}
        calls = {name: _Call(name, functions[name], seen[name], self._restored) for name in seen}
        for namespace in _namespaces():
            for name, function in functions.items():
                if namespace.get(name) is function:
                    self._replace(namespace, name, function, calls[name])
        for namespace in _namespaces_of_forwards(model):
            for key, value in tuple(namespace.items()):
                for name, function in functions.items():
                    if value is function:
                        self._replace(namespace, key, function, calls[name])

    def end(self) -> None:
        """Restore the functions, except where other code has replaced them since."""
        while self._replaced:
            namespace, key, function, call = self._replaced[-1]
            if namespace.get(key) is call:
                namespace[key] = function
            self._replaced.pop()  # last: a signal handler may raise in between

    @property
    def begun(self) -> bool:
        """Whether functions are replaced."""
        return bool(self._replaced)

    @contextmanager
    def _restored(self, call: _Call) -> Iterator[None]:
        """Put the function of one call back for a while."""
        places = [each for each in self._replaced if each[3] is call]
        for namespace, key, function, _ in places:
            if namespace.get(key) is call:
                namespace[key] = function
        try:
            yield
        finally:
            kept = {id(each) for each in self._replaced}
            for place in places:
                namespace, key, function, _ = place
                if id(place) in kept and namespace.get(key) is function:
                    namespace[key] = call

    def _replace(self, namespace: dict[str, Any], key: str, function: Any, call: Any) -> None:
        self._replaced.append((namespace, key, function, call))
        namespace[key] = call


def caller_among(frame: FrameType | None, places: Mapping[int, int]) -> int | None:
    """Return the place of the innermost module, by `id`, whose forward a frame runs in."""
    while frame is not None:
        if frame.f_code is _RUN_OF_MODULE:
            place = places.get(id(frame.f_locals.get("self")))
            if place is not None:
                return place
        frame = frame.f_back
    return None


def has_compiled() -> bool:
    """Return whether `torch.compile` has compiled anything in this process.

    It would compile what calls a function once more while that is replaced.
    """
    dynamo = sys.modules.get("torch._dynamo.utils")
    if dynamo is None:
        return False
    frames = dynamo.counters.get("frames", {})
    return bool(frames.get("total", 0))


def _namespaces() -> Iterable[dict[str, Any]]:
    """Return what modules define; of torch only the module that the functions are of."""
    return [vars(F)] + [
        vars(module)
        for name, module in tuple(sys.modules.items())
        if isinstance(module, ModuleType) and name.partition(".")[0] != "torch"
    ]


def _namespaces_of_forwards(model: nn.Module) -> Iterable[dict[str, Any]]:
    found = {}
    for kind in {type(module) for module in model.modules()}:
        namespace = getattr(kind.forward, "__globals__", None)
        if isinstance(namespace, dict) and not kind.__module__.startswith("torch."):
            found[id(namespace)] = namespace
    return found.values()


def spread(counts: Sequence[int], at_most: Sequence[int], offset: int) -> tuple[slice, ...]:
    """Return, of each of some dimensions, at most so many of its indices, evenly spread.

    Over the offsets from 0, each combination of indices is among them sooner or later; the first
    dimensions change fastest.
    """
    picked = []
    for count, limit in zip(counts, at_most, strict=True):
        step = max(1, -(-count // limit))
        offset, start = divmod(offset, step)
        picked.append(slice(start, None, step))
    return tuple(picked)


def widened(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor in at least 32 bits."""
    return tensor if tensor.dtype is torch.float64 else tensor.float()


def lowest_visible(dtype: torch.dtype) -> float:
    """Return the number up to which a logit or a bias means that its key is masked.

    Masks are made of -Inf, or of the lowest number of their format.
    """
    return torch.finfo(dtype).min / 2 if dtype.is_floating_point else -torch.inf


BATCHES_AT_MOST = 2
HEADS_AT_MOST = 4
QUERIES_AT_MOST = 16
KEYS_AT_MOST = 2048


def attention_row(
    query: torch.Tensor,
    key: torch.Tensor,
    *,
    mask: torch.Tensor | None = None,
    is_causal: bool = False,
    diagonal: int = 0,
    scale: float | None = None,
    offset: int = 0,
) -> torch.Tensor | None:
    """Return float64 [C], the columns of `ATTENTION`, on the device of `query`; None without any.

    query [..., Hq, L, E], key [..., H, S, E], mask broadcastable to [..., Hq, L, S]: as
    `scaled_dot_product_attention` takes them, with or without `enable_gqa`. The logits are
    query · key * scale + mask, in at least 32 bits. diagonal: with `is_causal`, the one up to which
    keys are visible. offset: which heads and queries are looked at; keys are spread over all, the
    first one always among them.
    """
    query_BHLE, key_BHSE = _of_four(query), _of_four(key)
    batch = max(query_BHLE.shape[0], key_BHSE.shape[0])
    heads, keys = key_BHSE.shape[1], key_BHSE.shape[2]
    if not query_BHLE.numel() or not key_BHSE.numel():
        return None
    query_BHLE = query_BHLE.expand(batch, max(heads, query_BHLE.shape[1]), -1, -1)
    members, queries = query_BHLE.shape[1] // heads, query_BHLE.shape[2]
    members_at_most = max(1, HEADS_AT_MOST // min(heads, HEADS_AT_MOST))
    some_heads, some_members, some_queries, some_batches = spread(
        (heads, members, queries, batch),
        (HEADS_AT_MOST, members_at_most, QUERIES_AT_MOST, BATCHES_AT_MOST),
        offset,
    )
    (some_keys,) = spread((keys,), (KEYS_AT_MOST,), 0)
    picked = (some_batches, some_heads, some_members, some_queries)
    few_queries = query_BHLE.reshape(batch, heads, members, queries, -1)[picked]
    few_keys = key_BHSE.expand(batch, -1, -1, -1).unsqueeze(2)[
        some_batches, some_heads, :, some_keys
    ]
    factor = 1.0 / sqrt(query.shape[-1]) if scale is None else scale
    logits = torch.matmul(widened(few_queries), widened(few_keys).mT) * factor
    visible = torch.ones_like(logits, dtype=torch.bool)
    if mask is not None:
        mask_BHLS = _of_four(mask).expand(batch, heads * members, queries, keys)
        few_of_mask = mask_BHLS.reshape(batch, heads, members, queries, keys)[picked][
            ..., some_keys
        ]
        if mask.dtype is torch.bool:
            visible = visible & few_of_mask
        else:
            visible = visible & ~(few_of_mask <= lowest_visible(mask.dtype))
            logits = logits + widened(few_of_mask)
    if is_causal:
        rows = torch.arange(queries, device=query.device)[some_queries]
        columns = torch.arange(keys, device=query.device)[some_keys]
        visible = visible & (columns <= rows.unsqueeze(1) + diagonal)
    return _row(logits, visible)


def weights_row(logits: torch.Tensor, offset: int = 0) -> torch.Tensor | None:
    """Return the same row for logits [..., H, L, S] that exist as a tensor, with the mask added."""
    logits_BHLS = _of_four(logits)
    if not logits_BHLS.numel():
        return None
    batch, heads, queries, keys = logits_BHLS.shape
    some_heads, some_queries, some_batches = spread(
        (heads, queries, batch), (HEADS_AT_MOST, QUERIES_AT_MOST, BATCHES_AT_MOST), offset
    )
    (some_keys,) = spread((keys,), (KEYS_AT_MOST,), 0)
    few = logits_BHLS[some_batches, some_heads, some_queries, some_keys]
    return _row(widened(few), ~(few <= lowest_visible(logits.dtype)))


def _row(logits: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
    finite = logits.isfinite()
    counted = visible & finite
    largest = logits.double().masked_fill(~counted, -torch.inf).amax()
    return torch.stack(
        [
            visible.sum().double(),
            (visible & ~finite).sum().double(),
            largest.masked_fill(~counted.any(), nan),
        ]
    )


def _of_four(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of four dimensions; of more of them, the first of each."""
    while tensor.dim() > 4:
        tensor = tensor[0]
    while tensor.dim() < 4:
        tensor = tensor.unsqueeze(0)
    return tensor


ROWS_AT_MOST = 32


def logits_row(
    logits: torch.Tensor, target: torch.Tensor, ignore_index: int = -100, offset: int = 0
) -> torch.Tensor | None:
    """Return float64 [C], the columns of `LOGITS`, on the device of `logits`; None without any.

    logits [K], [N, K] or [N, K, d1, ...], target of classes (without the K) or probabilities (with
    it): as `cross_entropy` takes them. Rows whose target is `ignore_index` do not count. offset:
    which rows are looked at. The log-sum-exp is computed in at least 32 bits.
    """
    if not logits.numel():
        return None
    rows = logits.movedim(1, -1) if logits.dim() > 1 else logits.unsqueeze(0)
    classes = None if target.is_floating_point() else target.reshape(rows.shape[:-1])
    picked = _picked(rows.shape[:-1], offset)
    few_RK = widened(rows[picked]).reshape(-1, rows.shape[-1])
    counted_R = torch.ones_like(few_RK[:, 0], dtype=torch.bool)
    if classes is not None:
        counted_R = classes[picked].reshape(-1) != ignore_index
    sums_R = few_RK.logsumexp(dim=1).double()
    judged_R = counted_R & sums_R.isfinite()
    none = ~judged_R.any()
    seen_RK = few_RK.isfinite() & counted_R.unsqueeze(1)
    largest = few_RK.double().masked_fill(~seen_RK, -torch.inf).amax()
    return torch.stack(
        [
            counted_R.sum().double(),
            (counted_R & ~judged_R).sum().double(),
            largest.masked_fill(~seen_RK.any(), nan),
            sums_R.masked_fill(~judged_R, -torch.inf).amax().masked_fill(none, nan),
            sums_R.masked_fill(~judged_R, torch.inf).amin().masked_fill(none, nan),
            sums_R.masked_fill(~judged_R, 0.0).sum(),
        ]
    )


def _picked(counts: Sequence[int], offset: int) -> tuple[slice, ...]:
    """Return which of the rows, by the dimensions that count them."""
    left, at_most = ROWS_AT_MOST, []
    for count in counts:
        at_most.append(left)
        left = max(1, left // min(count, left))
    return spread(counts, at_most, offset)


_FUSED = {
    "ScaledDotProductCudnnAttentionBackward0": "attn_bias",
    "ScaledDotProductEfficientAttentionBackward0": "attn_bias",
    "ScaledDotProductFlashAttentionBackward0": None,
    "ScaledDotProductFlashAttentionForCpuBackward0": "attn_mask",
}
"""The nodes of torch's kernels of attention, with their name of the mask."""
_SOFTMAX = ("SafeSoftmaxBackward0", "SoftmaxBackward0")
_BATCHED = {"BaddbmmBackward0": 1, "BmmBackward0": 0}
"""The nodes of products of queries and keys, with the place of the queries."""
_PATH_NODES = 32
_ANCESTORS = 1024
_LAYERS = 2
_MASKED_BELOW = -1e3
"""What is added to the logit of a token that is not to be seen is less."""


def attention_in(nodes: Sequence[Any]) -> Sequence[tuple[Any, Any]]:
    """Return the nodes of attention, or of any softmax, with what multiplies its result."""
    names = [node.name() for node in nodes]
    named = list(zip(nodes, names, strict=True))
    factors = {_source(node): node for node, name in named if name == "MulBackward0"}
    kinds = (*_FUSED, *_SOFTMAX)
    return [(node, factors.get(node)) for node, name in named if name in kinds]


def next_seen(
    attention: Iterable[tuple[Any, Any]], embedding: Any, length: int
) -> Sequence[torch.Tensor]:
    """Return where tokens see the next ones [..., T - 1], of layers of self-attention over all T.

    attention: in the graph of a loss. embedding: the node of it that the tokens have come from.
    """
    found: list[torch.Tensor] = []
    for node, product in attention:
        seen = (
            _seen_by_kernel(node, length)
            if node.name() in _FUSED
            else _seen_by_softmax(node, product, length)
        )
        if seen is not None and _is_of(_attended(node), embedding):
            found.append(seen)
            if len(found) == _LAYERS:
                break
    return found


def _seen_by_kernel(node: Any, length: int) -> torch.Tensor | None:
    query, key = saved(node, "query"), saved(node, "key")
    if query is None or key is None or {query.shape[-2], key.shape[-2]} != {length}:
        return None
    name = _FUSED[node.name()]
    if node._saved_is_causal or name is None or getattr(node, f"_raw_saved_{name}").data is None:
        return torch.full((1, length - 1), not node._saved_is_causal, device=query.device)
    if (mask := saved(node, name)) is None:
        return None
    diagonal = mask.expand(*mask.shape[:-2], length, length).diagonal(1, -2, -1)
    return diagonal if mask.dtype is torch.bool else diagonal > _MASKED_BELOW


def _seen_by_softmax(node: Any, product: Any, length: int) -> torch.Tensor | None:
    """product: what has multiplied the weights, by a mask or by dropout's; None without any."""
    weights = saved(node, "result")
    if weights is None or weights.dim() < 3 or weights.shape[-2:] != (length, length):
        return None
    seen = weights.diagonal(1, -2, -1) > 0  # a softmax gives what is masked exactly 0
    if product is None:
        return seen
    factor = saved(product, "other" if next_node(product, 0) is node else "self")
    if factor is None:
        return None
    return seen & (factor.expand_as(weights).diagonal(1, -2, -1) != 0)


def _attended(node: Any) -> Any:
    """Return what has made both queries and keys, directly or by a projection each; else None."""
    place = 0
    if node.name() not in _FUSED:
        for _ in range(_PATH_NODES):
            if node is None or node.name() in _BATCHED:
                break
            node = None if node.name() in PRODUCTS else _source(node)
        if node is None or node.name() not in _BATCHED:
            return None
        place = _BATCHED[node.name()]
    of_keys = set(_path(next_node(node, place + 1)))
    return next((each for each in _path(next_node(node, place)) if each in of_keys), None)


def _path(node: Any) -> Iterator[Any]:
    """Yield what queries, or keys, were made of, back to what was projected."""
    projected = False
    for _ in range(_PATH_NODES):
        if node is None or node.name() == "torch::autograd::AccumulateGrad":
            return
        yield node
        if projected and node.name() not in SAME_NUMBERS:
            return
        projected = projected or node.name() in PRODUCTS
        node = _source(node)


def _source(node: Any) -> Any:
    """Return what has made the first operand that needs gradients, of a linear layer its input."""
    if node.name() == "AddmmBackward0":
        return next_node(node, 1)
    return next((each for each, _ in node.next_functions if each is not None), None)


def _is_of(node: Any, embedding: Any) -> bool:
    """Return whether a tensor was made from what an embedding has made."""
    waiting, seen = [node], {node}
    while waiting and len(seen) <= _ANCESTORS:
        node = waiting.pop()
        if node is None:
            continue
        if node is embedding:
            return True
        found = [each for each, _ in node.next_functions if each not in seen]
        seen.update(found)
        waiting += reversed(found)
    return False
