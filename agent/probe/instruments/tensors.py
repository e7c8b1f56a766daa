"""Tensors that a script watches, over all of it or over slices, and their part of a step."""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from math import inf, nan
from sys import float_info

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from mp_agent.errors import SettingError
from mp_agent.inputs.files import as_utf8
from mp_agent.probe import accelerator
from mp_agent.probe.instruments.instrument import Instrument, ScaledOptimizer
from mp_agent.probe.isolation import computed, has_memory
from mp_agent.probe.statistics.pieces import folded, pieces
from mp_agent.probe.step.open_step import OpenStep
from mp_agent.probe.step.thread_progress import within_backward
from mp_agent.records.columns import TENSOR_EXPONENTS, TENSORS
from mp_agent.records.tensor_collections import (
    COLLECTIONS_AT_MOST,
    SLICES_AT_MOST,
    TensorCollection,
    encode_collections,
    make_collection,
)

_BINS = len(TENSOR_EXPONENTS)
_LANES = 64
"""Copies of the bins on a device: threads that add to one number wait for each other."""
_MANTISSA_BITS = 52
_BIAS = 1023
_LOWEST, _HIGHEST = TENSOR_EXPONENTS[0] + _BIAS, TENSOR_EXPONENTS[-1] + _BIAS


def magnitudes_in_bins(magnitudes_N: torch.Tensor) -> torch.Tensor:
    """Return float64 [B], the number of elements in each bin of `TENSOR_EXPONENTS`.

    magnitudes_N: float64 and finite, at least 0. Counts are exact; zeros are in no bin.
    """
    bits_N = magnitudes_N.contiguous().view(torch.int64)
    places_N = (bits_N >> _MANTISSA_BITS).clamp_(_LOWEST, _HIGHEST).sub_(_LOWEST)
    if accelerator.is_on_host(magnitudes_N.device):
        counts_B = torch.zeros(_BINS, dtype=torch.float64)
        counts_B.scatter_add_(0, places_N, torch.ones_like(magnitudes_N))
    else:
        counts_B = counted_in_lanes(places_N)
    counts_B[0] -= (magnitudes_N == 0.0).sum()
    return counts_B


def counted_in_lanes(places_N: torch.Tensor) -> torch.Tensor:
    """Return float64 [B], how often each bin occurs among places, on their device."""
    lanes_N = torch.arange(places_N.numel(), device=places_N.device) % _LANES
    counts = torch.zeros(_LANES * _BINS, dtype=torch.float64, device=places_N.device)
    ones_N = torch.ones_like(places_N, dtype=torch.float64)
    # Unlike scatter_add_, it also runs where algorithms are to be deterministic.
    counts.index_add_(0, places_N + lanes_N * _BINS, ones_N)
    return counts.view(_LANES, _BINS).sum(0)


class RunningSum:
    """A sum of terms, one after the other, rounded to `dtype` after each.

    Each addition is judged by itself: the sum of the terms before, exact to float64 and rounded
    once, plus the term. Terms that leave it as it is are lost, and so are all after it has left the
    range of the dtype.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype = dtype
        self._total = torch.zeros(1, dtype=torch.float64, device=device)

    def lost(self, terms_N: torch.Tensor) -> torch.Tensor:
        """Add terms, float64 and finite; return the sum of the lost magnitudes, 0-dim."""
        exact_N = terms_N.cumsum(0) + self._total
        before_N = torch.cat((self._total, exact_N[:-1]))
        self._total = exact_N[-1:]
        kept_N = before_N.to(self._dtype).double()
        after_N = (kept_N + terms_N).to(self._dtype).double()
        lost_N = (after_N == kept_N) | ~kept_N.isfinite()
        return terms_N.abs().masked_fill(~lost_N, 0.0).sum()


def range_ratio(values: torch.Tensor, dim: int, limit: int) -> torch.Tensor:
    """Return float64 [], packed as in `records.slice_ratio`; NaN without two ranges above 0.

    values: not empty, strided, of any shape; at most `SLICES_AT_MOST` slices along `dim`, from 0.
    limit: elements that are widened to float64 at once. A slice's range is from its smallest to its
    largest finite element; at fault is the slice whose range is farther from the geometric mean of
    all.
    """
    slices = values.shape[dim]
    low_K = torch.full((slices,), inf, dtype=torch.float64, device=values.device)
    high_K = -low_K
    others = [other for other in range(values.dim()) if other != dim]
    for start, part in _slice_parts(values, dim, limit):
        wide = part.double()
        wild = ~wide.isfinite()
        here = slice(start, start + part.shape[dim])
        lowest, highest = wide.masked_fill(wild, inf), wide.masked_fill(wild, -inf)
        if others:
            lowest, highest = lowest.amin(others), highest.amax(others)
        low_K[here] = torch.minimum(low_K[here], lowest)
        high_K[here] = torch.maximum(high_K[here], highest)
    return _packed_ratio((high_K - low_K).clamp(max=float_info.max))


def _packed_ratio(ranges_K: torch.Tensor) -> torch.Tensor:
    there_K = ranges_K > 0.0
    count = there_K.sum()
    high_K = ranges_K.masked_fill(~there_K, -inf)
    low_K = ranges_K.masked_fill(~there_K, inf)
    largest, smallest = high_K.amax(), low_K.amin()
    usual = ranges_K.log().masked_fill(~there_K, 0.0).sum() / count
    too_large = largest.log() - usual >= usual - smallest.log()
    index = torch.where(too_large, high_K.argmax(), low_K.argmin())
    ratio = (largest / smallest).clamp(max=float_info.max)
    bits = ratio.view(torch.int64) & ~(SLICES_AT_MOST - 1) | index
    return bits.view(torch.float64).masked_fill(count < 2, nan)


def _slice_parts(
    values: torch.Tensor, dim: int, limit: int, start: int = 0
) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield views of at most `limit` elements that cover `values`, each with its first slice."""
    count = values.numel()
    if count <= limit:
        yield start, values
        return
    along = max(range(values.dim()), key=lambda other: (other != dim, values.shape[other]))
    if values.shape[along] == 1:
        along = dim
    rows = max(1, limit * values.shape[along] // count)
    for place, part in enumerate(torch.split(values, rows, dim=along)):
        yield from _slice_parts(part, dim, limit, start + place * rows if along == dim else start)


_HOST_CHUNK_ELEMENTS = 64 * 1024
"""As float64 they fit the processor's cache."""
_DEVICE_CHUNK_ELEMENTS = 4 * 1024 * 1024
"""Bounds the scratch on a device: each chunk is widened to float64."""


def tensor_row(tensor: torch.Tensor, *, dim: int | None, reduction: bool) -> torch.Tensor:
    """Return float64 [C], the columns of `TENSORS`, on the device of `tensor`.

    tensor: not empty, strided, of numbers or truth values; the real and imaginary parts of complex
    ones count separately, and are two sums. dim: from 0, the dimension whose slices are compared.
    reduction: whether the script sums the elements in this dtype.
    """
    host = tensor.device.type == "cpu"
    limit = _HOST_CHUNK_ELEMENTS if host else _DEVICE_CHUNK_ELEMENTS
    rows = []
    for values in _parts(tensor):
        rounded = values.is_floating_point() and _has_running_sum(values)
        running = RunningSum(values.dtype, values.device) if rounded else None
        rows += [_piece_row(piece, running, reduction=reduction) for piece in pieces(values, limit)]
    row = folded(TENSORS, rows)
    if dim is not None:
        values = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        row[TENSORS.names.index("range_ratio")] = range_ratio(values, dim, limit)
    return row


def _parts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    if tensor.is_complex():
        yield from (tensor.real, tensor.imag)
    else:
        yield tensor


def _has_running_sum(values: torch.Tensor) -> bool:
    """Return whether torch may compute one: not on CUDA where it is to be deterministic."""
    return values.device.type == "cpu" or not torch.are_deterministic_algorithms_enabled()


def _piece_row(piece: torch.Tensor, running: RunningSum | None, *, reduction: bool) -> torch.Tensor:
    values_N = piece.double().reshape(-1)
    finite_N = values_N.isfinite()
    finites = finite_N.sum()
    values_N = values_N.masked_fill(~finite_N, 0.0)
    magnitudes_N = values_N.abs()
    absent = torch.full_like(values_N[0], nan)
    smallest = magnitudes_N.masked_fill(magnitudes_N == 0.0, inf).amin()
    swallowed = absent if running is None else running.lost(values_N)
    columns = {
        "elements": torch.full_like(absent, values_N.numel()),
        "nonfinite_elements": (values_N.numel() - finites).double(),
        "sum": _bounded(values_N.sum()),
        "sum_squares": _bounded((values_N * values_N).sum()),
        "abs_sum": _bounded(magnitudes_N.sum()),
        "abs_max": magnitudes_N.amax().masked_fill(finites == 0, nan),
        "abs_min": smallest.masked_fill(smallest == inf, nan),
        "swallowed_sum": _bounded(swallowed),
        "reduction": torch.full_like(absent, float(reduction)),
        "range_ratio": absent,
    }
    single = TENSORS.names[: len(columns)]
    return torch.cat(
        (torch.stack([columns[name] for name in single]), magnitudes_in_bins(magnitudes_N))
    )


def _bounded(total: torch.Tensor) -> torch.Tensor:
    """Return a sum of finite numbers, at most float64's largest magnitude."""
    return total.clamp(-float_info.max, float_info.max)


NAMES_AT_MOST = 64
"""Names that one process watches; each is a row in every record of a sampled step."""
NAME_CHARACTERS_AT_MOST = 128
CALLS_AT_MOST = 64
"""Tensors of one name and step that are measured, such as those of micro-batches."""

_WATCHED = "watch_tensor"
_NO_NAME = f"{_WATCHED}: names that are no text of 1 to {NAME_CHARACTERS_AT_MOST} characters"
_NAMES = f"{_WATCHED}: more than {NAMES_AT_MOST} names"
_CALLS = f"{_WATCHED}: more than {CALLS_AT_MOST} tensors of one name in a step"
_NO_DIM = f"{_WATCHED}: dimensions that the tensor lacks"
_SLICES = f"{_WATCHED}: dimensions of more than {SLICES_AT_MOST} slices"


class WatchedTensors(Instrument):
    """Measures the tensors that it is given while a sampled step is under way.

    All calls of a name in one step become one row. What cannot be measured is counted, and said
    once.
    """

    subject = "watched tensors"
    begins = "once used"

    def __init__(
        self, is_training: Callable[[], bool], note_unsupported: Callable[[str], None]
    ) -> None:
        self.names: tuple[str, ...] = ()
        """Those that the schema has, in the order in which they came."""
        self._is_training = is_training
        self._note_unsupported = note_unsupported
        self._known: dict[str, None] = {}
        self._rows: dict[str, list[torch.Tensor]] = {}
        self._streams: set[Hashable] = set()
        self._unmeasured = 0

    def watch(self, name: object, tensor: object, dim: object, reduction: object) -> None:
        """Measure a tensor, unless the model is evaluated or backward recomputes it."""
        if not self._is_training() or within_backward():
            return
        problem = self._problem_of_name(name) or _problem_of(tensor)
        if problem or not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
            self._note(problem)
            return
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        local = local.detach().resolve_conj().resolve_neg()
        if not local.numel():
            return
        if not has_memory(local):
            self._note(f"{_WATCHED}: tensors of which the memory was freed")
            return
        place = self._place(dim, local)
        row = computed(tensor_row, local, dim=place, reduction=reduction is True)
        if row is None:
            kind = tensor.dtype if type(local) is torch.Tensor else type(tensor).__name__[:32]
            self._note(f"{_WATCHED}: tensors of type {kind}")
            return
        if not accelerator.is_on_host(local.device):
            self._streams.add(accelerator.current_stream(local.device))
        self._known[as_utf8(name)] = None
        self._rows.setdefault(as_utf8(name), []).append(row)

    def layers(self, model: nn.Module | None) -> Mapping[str, tuple[str, ...]]:
        """Return the names that were watched when the last record began."""
        return {TENSORS.name: self.names} if self.names else {}

    def step_begins(self, model: nn.Module | None) -> None:
        """Forget what was measured for a step that did not end."""
        self._rows, self._streams, self._unmeasured = {}, set(), 0

    def measuring_begins(self, step: OpenStep, scaled: Sequence[ScaledOptimizer]) -> None:
        """Let the schema have all names so far, if no record of the step is written yet."""
        if not step.totals and len(self.names) != len(self._known):
            self.names = tuple(self._known)

    def finish(self, step: OpenStep) -> None:
        """Add what was measured to the step that ends. A name that is new since is left out."""
        rows, self._rows = self._rows, {}
        late = sum(len(found) for name, found in rows.items() if name not in self.names)
        if unmeasured := self._unmeasured + late:
            step.scalars["unmeasured_tensors"] = float(unmeasured)
        there = [name for name in self.names if name in rows]
        if not there:
            return
        found = [folded(TENSORS, accelerator.on_one_device(rows[name])) for name in there]
        one_each = dict(zip(there, accelerator.on_one_device(found), strict=True))
        device = next(iter(one_each.values())).device
        absent = torch.full((len(TENSORS.names),), nan, dtype=torch.float64, device=device)
        step.own_rows[TENSORS.name] = torch.stack(
            [one_each.get(name, absent) for name in self.names]
        )
        step.streams.update(self._streams)

    def _problem_of_name(self, name: object) -> str:
        """Return why a tensor of this name is not measured; "" if it is."""
        if not isinstance(name, str) or not 0 < len(name) <= NAME_CHARACTERS_AT_MOST:
            return _NO_NAME
        known = as_utf8(name)
        if known not in self._known and len(self._known) >= NAMES_AT_MOST:
            return _NAMES
        return _CALLS if len(self._rows.get(known, ())) >= CALLS_AT_MOST else ""

    def _place(self, dim: object, tensor: torch.Tensor) -> int | None:
        """Return the dimension, from 0; None where there is none to compare slices along."""
        if dim is None:
            return None
        if type(dim) is not int or not -tensor.dim() <= dim < tensor.dim():
            self._note_unsupported(_NO_DIM)
            return None
        if tensor.shape[dim] > SLICES_AT_MOST:
            self._note_unsupported(_SLICES)
            return None
        return dim % tensor.dim()

    def _note(self, problem: str) -> None:
        self._unmeasured += 1
        self._note_unsupported(problem)


def _problem_of(tensor: object) -> str:
    """Return why a tensor cannot be measured; "" if it can."""
    if not isinstance(tensor, torch.Tensor):
        return f"{_WATCHED}: what is no tensor of torch"
    if tensor.is_quantized:
        return f"{_WATCHED}: quantized tensors"
    if tensor.layout is not torch.strided or tensor.is_nested:
        return f"{_WATCHED}: sparse and nested tensors"
    if not accelerator.is_supported(tensor.device):
        return f"{_WATCHED}: tensors on devices of type {tensor.device.type}"
    return ""


class TensorCollections:
    """All definitions so far, by name; they outlive a `shutdown()`.

    fact: the same as the schema has it.
    """

    def __init__(self) -> None:
        self.fact = ""
        self._known: dict[str, TensorCollection] = {}

    def define(self, name: object, include: object) -> None:
        """Add a collection. Raises SettingError, naming the argument and its value.

        The same definition again changes nothing.
        """
        collection = make_collection(name, include)
        before = self._known.get(collection.name)
        if before == collection:
            return
        if before is not None:
            raise SettingError(
                f"name has value {name!r}: it is defined already, with include={before.patterns!r}"
            )
        if len(self._known) >= COLLECTIONS_AT_MOST:
            raise SettingError(
                f"name has value {name!r}: there are {COLLECTIONS_AT_MOST} collections, which is "
                "as many as one process can have"
            )
        known = {**self._known, collection.name: collection}
        fact = encode_collections(known.values())
        self._known, self.fact = known, fact

    def clear(self) -> None:
        """Forget all definitions."""
        self._known, self.fact = {}, ""


tensor_collections = TensorCollections()
"""The collections of this process."""
