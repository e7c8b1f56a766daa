"""The tensors that the script watches in the step under way, by name."""

from collections.abc import Callable, Hashable
from math import nan

import torch
from torch.distributed.tensor import DTensor

from mp_agent.probe import accelerator
from mp_agent.probe.isolation.incomputable import computed, has_memory
from mp_agent.probe.statistics.folding import folded
from mp_agent.probe.step.open_step import OpenStep
from mp_agent.probe.step.thread_progress import within_backward
from mp_agent.probe.tensors.statistics import tensor_row
from mp_agent.records.columns import TENSORS
from mp_agent.records.slice_ratio import SLICES_AT_MOST
from mp_agent.records.text import as_utf8

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


class WatchedTensors:
    """Measures the tensors that it is given while a sampled step is under way.

    `due` says whether it is: before the first step has ended it is. All calls of a name in one step
    become one row. What cannot be measured is counted, and said once.
    """

    def __init__(
        self, is_training: Callable[[], bool], note_unsupported: Callable[[str], None]
    ) -> None:
        self.due = True
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

    def admit(self) -> None:
        """Let the schema have all names so far; called where no record of a step is written yet."""
        if len(self.names) != len(self._known):
            self.names = tuple(self._known)

    def begin(self, *, due: bool) -> None:
        """Begin the next step."""
        self.due = due
        self._rows, self._streams, self._unmeasured = {}, set(), 0

    def take(self, step: OpenStep) -> None:
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
