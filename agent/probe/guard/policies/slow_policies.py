"""The policies that follow trouble over several updates, from outcomes on the host."""

from collections.abc import Mapping

from torch import nn

from mp_agent.catalog.guard import Action, Values
from mp_agent.probe.guard.decision.outcome import UpdateOutcome
from mp_agent.probe.guard.policies.learning_rate import RateReduction
from mp_agent.probe.guard.policies.precision import PrecisionSwitch
from mp_agent.probe.guard.policies.requests import Requests
from mp_agent.probe.guard.policies.trouble import ObservedUpdate, TroubleTrigger


class SlowPolicies:
    """Those of one process. Outcomes are the same on all ranks, and so is what is done."""

    def __init__(
        self, policies: Mapping[str, Values], requests: Requests, *, dry_run: bool
    ) -> None:
        self._requests = requests
        self._dry_run = dry_run
        rate, precision = policies.get("lower_learning_rate"), policies.get("widen_precision")
        self._rate = None if rate is None else RateReduction(rate)
        self._precision = None if precision is None else PrecisionSwitch(precision, dry_run=dry_run)
        checkpoint, stop = policies.get("request_checkpoint"), policies.get("request_stop")
        self._checkpoint = None if checkpoint is None else TroubleTrigger(checkpoint)
        self._stop = None if stop is None else TroubleTrigger(stop)

    @property
    def rate_factor(self) -> float:
        """What the learning rate of the next update is multiplied by."""
        return 1.0 if self._rate is None else self._rate.factor

    def observe(
        self, outcome: UpdateOutcome, model: nn.Module | None, step: int, *, begins_step: bool
    ) -> list[Action]:
        """Add an update, and act; return what is done.

        step: the trainer's, under way. begins_step: whether the update is the first of its step.
        """
        actions: list[Action] = []
        seen = ObservedUpdate(is_trouble=outcome.is_trouble, begins_step=begins_step)
        if self._rate is not None and self._rate.observe(seen):
            actions.append(Action.LOWER_LEARNING_RATE)
        if self._precision is not None and self._precision.observe(seen, model):
            actions.append(Action.WIDEN_PRECISION)
        if self._checkpoint is not None and self._checkpoint.observe(seen):
            actions.append(Action.REQUEST_CHECKPOINT)
            if not self._dry_run:
                self._requests.ask_for_checkpoint(step)
        # The next update would write NaN or Inf into the weights.
        urgent = seen._replace(is_urgent=outcome.is_last_skip)
        if self._stop is not None and self._stop.observe(urgent):
            actions.append(Action.REQUEST_STOP)
            self._requests.stop = self._requests.stop or not self._dry_run
        if any(trigger.is_none_left for trigger in self._triggers):
            actions.append(Action.NONE_LEFT)
        return actions

    def close(self) -> None:
        """Restore what is switched."""
        if self._precision is not None:
            self._precision.switch_back()

    @property
    def _triggers(self) -> list[TroubleTrigger]:
        found = [] if self._rate is None else [self._rate.trigger]
        found += [] if self._precision is None else [self._precision.trigger]
        return found + [each for each in (self._checkpoint, self._stop) if each is not None]
