"""A digest of all weights, by which replicas are compared."""

import logging
from collections.abc import Callable, Sequence

import torch

from mp_agent.probe import accelerator
from mp_agent.probe.optimizers.measurement import Measurement
from mp_agent.probe.optimizers.plan import MeasurementPlan
from mp_agent.probe.step.open_step import OpenStep
from mp_agent.ring.interruptions import pass_on

log = logging.getLogger("mp_agent")


class DigestRecorder:
    """Adds the digest to a step, until weights are found of which there is none."""

    def __init__(self, measurement: Measurement, note_unsupported: Callable[[str], None]) -> None:
        self._measurement = measurement
        self._note_unsupported = note_unsupported
        self._possible = True

    def add(self, step: OpenStep, plans: Sequence[MeasurementPlan]) -> None:
        """Add the digest of the weights; without it where they are no ordinary tensors."""
        if not self._possible or not accelerator.is_supported(plans[0].device):
            return
        try:
            if (digest := self._measurement.weight_digest(plans)) is not None:
                step.scalars["weight_digest"] = digest
        except (TypeError, RuntimeError) as error:
            pass_on(error)
            if accelerator.is_sticky_error(error) or isinstance(error, torch.OutOfMemoryError):
                return  # no fault of the weights
            self._possible = False
            self._note_unsupported("digests of weights of this kind")
            log.debug("the weights have no digest", exc_info=True)
