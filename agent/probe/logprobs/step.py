"""Adds reported log-probabilities to the step under way, and refuses what cannot be compared."""

from collections.abc import Callable, Hashable

import torch

from mp_agent.probe import accelerator
from mp_agent.probe.isolation.incomputable import computed, has_memory
from mp_agent.probe.logprobs.comparison import LogprobComparison, joined, refused_row
from mp_agent.probe.scalars import local_of
from mp_agent.probe.step.open_step import OpenStep
from mp_agent.records.columns import LOGPROBS

NO_TENSORS = "observe_logprobs of what is no tensor of floating-point numbers"
SHAPES = "observe_logprobs of tensors of different shapes"
MASK = "observe_logprobs with a mask that is no tensor of the same shape"
PLACES = "observe_logprobs of tensors on several GPUs, on other devices, or sharded"

INCOMPUTABLE = "observe_logprobs of tensors that torch cannot compute with"


class _RefusedError(Exception):
    """What was reported cannot be compared, for a reason that is said once."""


class StepLogprobs:
    """The comparisons of the step under way; several calls in a step add up."""

    def __init__(self, note_unsupported: Callable[[str], None]) -> None:
        self.used = False
        """Whether any were reported so far: records have a row for them from then on."""
        self._note_unsupported = note_unsupported
        self._comparison = LogprobComparison()
        self._stream: Hashable = None
        """On which the newest row is computed."""

    def add(self, step: OpenStep, trainer: object, sampler: object, mask: object) -> None:
        """Compare what was reported, on its device; what cannot be compared is counted and said."""
        self.used = True
        try:
            row_C = self._compared(step, trainer, sampler, mask)
        except _RefusedError as refused:
            self._note_unsupported(str(refused))
            row_C = refused_row()
        before_1C = step.own_rows.get(LOGPROBS.name)
        if before_1C is not None:
            row_C = joined(before_1C[0], row_C)
        step.own_rows[LOGPROBS.name] = row_C.reshape(1, -1)

    def _compared(
        self, step: OpenStep, trainer: object, sampler: object, mask: object
    ) -> torch.Tensor:
        trainer, sampler = _logprobs(trainer), _logprobs(sampler)
        if trainer.shape != sampler.shape:
            raise _RefusedError(SHAPES)
        chosen = None if mask is None else _mask(mask, trainer.shape)
        device = _common_device([each for each in (trainer, sampler, chosen) if each is not None])
        timer = accelerator.start_timer(device)
        if not accelerator.is_on_host(device):
            stream = accelerator.current_stream(device)
            if self._stream not in (None, stream):
                accelerator.wait_for_stream(device, self._stream)
            self._stream = stream
            step.streams.add(stream)
        row_C = computed(self._row, device, trainer, sampler, chosen)
        if timer is not None:
            timer.stop()
            step.timers.append(timer)
        if row_C is None:
            raise _RefusedError(INCOMPUTABLE)
        return row_C

    def _row(
        self,
        device: torch.device,
        trainer: torch.Tensor,
        sampler: torch.Tensor,
        chosen: torch.Tensor | None,
    ) -> torch.Tensor:
        return self._comparison.row(
            accelerator.sent(trainer, device),
            accelerator.sent(sampler, device),
            None if chosen is None else accelerator.sent(chosen, device),
        )


def _logprobs(value: object) -> torch.Tensor:
    tensor = _local(value, NO_TENSORS)
    if not tensor.is_floating_point():
        raise _RefusedError(NO_TENSORS)
    return tensor


def _mask(value: object, shape: torch.Size) -> torch.Tensor:
    tensor = _local(value, MASK)
    if tensor.shape != shape:
        raise _RefusedError(MASK)
    return tensor


def _local(value: object, otherwise: str) -> torch.Tensor:
    """Return a tensor without its graph; of a replicated DTensor this rank's copy."""
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided or value.is_nested:
        raise _RefusedError(otherwise)
    if (local := local_of(value.detach())) is None:
        raise _RefusedError(PLACES)
    if not has_memory(local):
        raise _RefusedError(INCOMPUTABLE)
    return local


def _common_device(tensors: list[torch.Tensor]) -> torch.device:
    """Return the accelerator that any of them is on, else the host: nothing comes from there."""
    elsewhere = {each.device for each in tensors if not accelerator.is_on_host(each.device)}
    if len(elsewhere) > 1 or not all(map(accelerator.is_supported, elsewhere)):
        raise _RefusedError(PLACES)
    return elsewhere.pop() if elsewhere else torch.device("cpu")
