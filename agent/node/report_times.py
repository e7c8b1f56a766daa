"""When the root should have a report: at regular times, and at once when something happens."""

from mp_agent.node.push.trouble import is_troubled
from mp_agent.records.rows import NodeStep
from mp_agent.records.steps import EndReason

Ends = tuple[EndReason, ...]
"""How the ranks of a node ended, in their order."""


class ReportTimes:
    """Remembers what the last report was about, and what has happened since."""

    def __init__(self, interval_seconds: float) -> None:
        self.urgent = False
        """Whether trouble began on this node since the last report."""
        self._interval_seconds = interval_seconds
        self._troubled = False
        self._reported_seconds: float | None = None
        self._reported_ends: Ends = ()

    def look_at(self, step: NodeStep, gradient_columns: tuple[str, ...]) -> None:
        """Take in whether a step of the node has something that cannot wait."""
        troubled = is_troubled(step, gradient_columns)
        self.urgent = self.urgent or (troubled and not self._troubled)
        self._troubled = troubled

    def due(self, now_seconds: float, ends: Ends) -> bool:
        """Return whether a report is to be made now."""
        if self._reported_seconds is None or self.urgent or ends != self._reported_ends:
            return True
        return now_seconds - self._reported_seconds >= self._interval_seconds

    def reported(self, now_seconds: float, ends: Ends) -> None:
        """Note that a report was made."""
        self._reported_seconds, self._reported_ends = now_seconds, ends
        self.urgent = False
