"""What is known of a job once it has ended."""

from dataclasses import dataclass

from examples.demo.scenarios import Scenario
from examples.demo.story import Trouble
from tools.servers.webhook import Notification


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One job: its mistake, what went wrong first, and the alerts that it brought."""

    scenario: Scenario
    first: Trouble | None
    alerts: tuple[Notification, ...]
    problem: str = ""
    """Why the job could not be watched; empty if it could."""

    @property
    def sentence(self) -> str:
        """What went wrong first, in words."""
        if self.problem:
            return self.problem
        if self.first is None:
            return "Nothing went wrong."
        where = f" ({self.first.where})" if self.first.where else ""
        layer = f"; largest gradient in {self.first.layer}" if self.first.layer else ""
        return f"First: {self.first.what}, at step {self.first.step}{where}{layer}."
