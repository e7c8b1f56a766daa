"""Runbook text of a condition, in addition to the condition's own record."""

import re
from dataclasses import dataclass

from mp_agent.errors import CatalogError

RUN_MARK = "RUN"
"""Stands for the run's name in a query."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """A dashboard panel that shows the condition; ids and uids are stable."""

    board: str
    id: int
    title: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Guidance:
    """Runbook text for the person who handles the alert.

    harm: severity: what is lost while it lasts, and how soon to act.
    query: PromQL that confirms it, for the run named RUN; reading: how to interpret the result.
    causes: likely ones, most likely first. false_positives: cases in which the run is healthy.
    samples: names of the code samples for the fix, without `.py`; the first is the main one.
    panels: dashboard panels; the first shows the condition best.
    """

    harm: str
    query: str
    reading: str
    causes: tuple[str, ...]
    false_positives: tuple[str, ...]
    samples: tuple[str, ...]
    panels: tuple[Panel, ...]

    def __post_init__(self) -> None:
        texts = (self.harm, self.reading, *self.causes, *self.false_positives)
        if not (self.causes and self.false_positives and self.samples and self.panels):
            raise CatalogError("causes, false positives, samples and panels are never empty")
        for text in texts:
            if not text.endswith("."):
                raise CatalogError(f"{text!r} is not a complete sentence")
        if f'run="{RUN_MARK}"' not in self.query:
            raise CatalogError(f"{self.query!r} is not of one run")

    @property
    def metric_names(self) -> frozenset[str]:
        """The metrics that the query names."""
        return frozenset(re.findall(r"\bmp_agent_\w+", self.query))
