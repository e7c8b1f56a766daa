"""Log-probabilities of a trainer compared with those of its sampler, and their part of a step.

A row of statistics of how two engines' log-probabilities differ; without waiting for a device.
Δ is the trainer's log-probability less the sampler's, and exp(Δ) the weight with which a token of
the sampler's counts for the trainer (J. Schulman, Approximating KL Divergence, 2020, with q the
sampler and p the trainer).
"""

from collections.abc import Callable, Hashable, Mapping
from math import nan

import numpy as np
import torch
from torch import nn

from mp_agent.probe import accelerator
from mp_agent.probe.accelerator import DeviceConstants, on_one_device
from mp_agent.probe.instruments.instrument import Instrument
from mp_agent.probe.isolation import computed, has_memory
from mp_agent.probe.scalars import local_of
from mp_agent.probe.step.open_step import OpenStep
from mp_agent.records.columns import DELTA_EDGES, LOGPROBS

MAGNITUDE_AT_MOST = 1e100
"""Of what counts as finite: no sum of squares then overflows."""
DENSITY_ABOVE = 0.1
"""A log-probability that is no rounding of 0, as a difference of logits in BF16 may be."""
DELTA_AT_MOST = 300.0
"""Of an exponent: sums of exp(Δ) and of its squares stay within float64."""

_PIECE_TOKENS_HOST = 2**15
_PIECE_TOKENS_DEVICE = 2**22
_EDGES = np.array(DELTA_EDGES).view(np.int64)
_BINS = len(DELTA_EDGES) + 1


class LogprobComparison:
    """Compares log-probabilities, and adds rows up."""

    def __init__(self) -> None:
        self._constants = DeviceConstants()

    def row(
        self, trainer: torch.Tensor, sampler: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        """Return the columns [C] of `LOGPROBS` as float64 on the device of the arguments.

        trainer, sampler: log-probabilities of the same tokens, floating point, of the same shape
        (any, also empty) on the same device. mask: of that shape; tokens count where it is not 0.
        Sums are over float64; tokens of which a log-probability is not finite are left out and
        counted.
        """
        limit = _PIECE_TOKENS_HOST if trainer.device.type == "cpu" else _PIECE_TOKENS_DEVICE
        trainer_N, sampler_N = trainer.detach().reshape(-1), sampler.detach().reshape(-1)
        mask_N = None if mask is None else mask.detach().reshape(-1)
        row_C = _empty_row(trainer.device)
        for begin in range(0, trainer_N.numel(), limit):
            part = slice(begin, begin + limit)
            counted_N = None if mask_N is None else mask_N[part] != 0
            row_C = joined(row_C, self._piece(trainer_N[part], sampler_N[part], counted_N))
        return row_C

    def _piece(
        self,
        trainer_N: torch.Tensor,
        sampler_N: torch.Tensor,
        counted_N: torch.Tensor | None,
    ) -> torch.Tensor:
        trainer_N, sampler_N = trainer_N.double(), sampler_N.double()
        finite_N = (trainer_N.abs() <= MAGNITUDE_AT_MOST) & (sampler_N.abs() <= MAGNITUDE_AT_MOST)
        if counted_N is None:
            counted_N = torch.ones_like(finite_N)
        there_N = counted_N & finite_N
        trainer_N = trainer_N.where(there_N, 0.0)
        delta_N = trainer_N - sampler_N.where(there_N, 0.0)
        exponent_N = delta_N.clamp(-DELTA_AT_MOST, DELTA_AT_MOST)
        weight_N = exponent_N.exp().where(there_N, 0.0)
        # A Δ that is cut off on the right is so in both terms; rounding must not make it negative.
        k3_N = (exponent_N.expm1() - delta_N.clamp(max=DELTA_AT_MOST)).clamp(min=0.0)
        magnitude_N = delta_N.abs()
        tokens = _count(there_N)
        sums = [
            tokens,
            _count(counted_N & ~finite_N),
            torch.zeros_like(tokens),
            _count(delta_N > DELTA_AT_MOST),
            delta_N.sum(),
            delta_N.square().sum(),
            k3_N.sum(),
            weight_N.sum(),
            weight_N.square().sum(),
            trainer_N.sum(),
            trainer_N.square().sum(),
            (trainer_N * delta_N).sum(),
            _count(trainer_N > DENSITY_ABOVE),
        ]
        largest = magnitude_N.amax().masked_fill(tokens == 0, nan)
        return torch.cat((torch.stack(sums), self._bins(magnitude_N, there_N), largest.reshape(1)))

    def _bins(self, magnitude_N: torch.Tensor, there_N: torch.Tensor) -> torch.Tensor:
        """Return how many tokens are in each bin [B]; counts are exact."""
        edges = self._constants.on(magnitude_N.device, _EDGES).view(torch.float64)
        places_N = torch.bucketize(magnitude_N, edges)
        bins_B = torch.zeros(_BINS, dtype=torch.float64, device=magnitude_N.device)
        return bins_B.index_add_(0, places_N, there_N.double())


def refused_row() -> torch.Tensor:
    """Return the row [C] of one call that could not be compared, on the host."""
    row_C = _empty_row(torch.device("cpu"))
    row_C[LOGPROBS.names.index("refused_calls")] = 1.0
    return row_C


def joined(one_C: torch.Tensor, other_C: torch.Tensor) -> torch.Tensor:
    """Return two rows as one, on the device if either is there: sums, and the larger maximum."""
    one_C, other_C = on_one_device((one_C, other_C))
    return torch.cat((one_C[:-1] + other_C[:-1], torch.fmax(one_C[-1:], other_C[-1:])))


def _empty_row(device: torch.device) -> torch.Tensor:
    row_C = torch.zeros(len(LOGPROBS.names), dtype=torch.float64, device=device)
    row_C[-1:].fill_(nan)
    return row_C


def _count(mask_N: torch.Tensor) -> torch.Tensor:
    return mask_N.sum(dtype=torch.float64)


NO_TENSORS = "observe_logprobs of what is no tensor of floating-point numbers"
SHAPES = "observe_logprobs of tensors of different shapes"
MASK = "observe_logprobs with a mask that is no tensor of the same shape"
PLACES = "observe_logprobs of tensors on several GPUs, on other devices, or sharded"

INCOMPUTABLE = "observe_logprobs of tensors that torch cannot compute with"


_LAYERS: Mapping[str, tuple[str, ...]] = {LOGPROBS.name: ()}


class _RefusedError(Exception):
    """What was reported cannot be compared, for a reason that is said once."""


class StepLogprobs(Instrument):
    """The comparisons of the step under way; several calls in a step add up."""

    subject = "log-probabilities"
    begins = "once used"

    def __init__(self, note_unsupported: Callable[[str], None]) -> None:
        self._note_unsupported = note_unsupported
        self._comparison = LogprobComparison()
        self._stream: Hashable = None
        """Stream on which the newest row is computed."""

    def layers(self, model: nn.Module | None) -> Mapping[str, tuple[str, ...]]:
        """Return the family: records have a row for it once any were reported."""
        return _LAYERS

    def add(self, step: OpenStep, trainer: object, sampler: object, mask: object) -> None:
        """Compare what was reported, on its device; what cannot be compared is counted and said."""
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
