"""What the guard keeps of one optimizer."""

from collections.abc import Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from mp_agent.catalog.guard import Values
from mp_agent.probe.guard.decision.outcome import Outcomes, UpdateOutcome
from mp_agent.probe.guard.decision.verdict import Judge, UpdateVerdict
from mp_agent.probe.guard.update import GuardedUpdate


class GuardedOptimizer:
    """The history of an optimizer's updates, and the one under way; keeps no parameter alive."""

    def __init__(self, policies: Mapping[str, Values], device: torch.device) -> None:
        self.device = device
        self._judge = Judge(policies, device)
        self._outcomes = Outcomes()
        self._update: GuardedUpdate | None = None

    def judge(self, agreed: torch.Tensor, ranks: int) -> tuple[UpdateVerdict, list[UpdateOutcome]]:
        """Return the verdict on the next update, and the outcomes that are due."""
        verdict = self._judge.judge(agreed, ranks)
        return verdict, self._outcomes.add(verdict)

    def carry_out(self, optimizer: Optimizer, verdict: UpdateVerdict, rate_factor: float) -> None:
        """Change the update under way; until `finish`."""
        self._update = GuardedUpdate(optimizer, verdict, rate_factor)

    def finish(self) -> None:
        """Restore what was changed for the update."""
        if self._update is not None:
            self._update.finish()
        self._update = None

    @property
    def rates_of_script(self) -> Mapping[int, Any]:
        """Learning rates that are lowered for the update under way as they were, by group."""
        return {} if self._update is None else self._update.rates_of_script
