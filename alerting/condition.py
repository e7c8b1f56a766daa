"""The condition record: one alert at all its severities, with all that is known about it.

Adding an alert is adding one of these to a module of `conditions`.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from mp_agent.alerting.backtesting import Knob, Quantity
from mp_agent.alerting.descriptions import Part, parse_description, prometheus_template
from mp_agent.alerting.durations import Duration
from mp_agent.alerting.expressions import (
    Predicate,
    Series,
    kept_labels,
    metrics_of,
)
from mp_agent.alerting.first_line import (
    Triage,
    causes_template,
    headline_template,
    since_step_template,
)
from mp_agent.alerting.links import (
    agent_runbook_url,
    dashboard_url,
    postmortem_url,
    runbook_url,
    tracker_url,
)
from mp_agent.alerting.panels import Guidance
from mp_agent.alerting.remedies import Remedy, remedy_template
from mp_agent.alerting.values import Severity, Values
from mp_agent.catalog.metric import Metric
from mp_agent.errors import CatalogError

COMPONENT = "mp-agent"
"""Label `component` of every alert; Alertmanager routes by it."""

ALERT_LABELS = ("cluster", "namespace", "job", "run")
"""Labels that every alert has, besides those that its predicate keeps."""

_NAME = re.compile(r"MpAgent([A-Z][a-z0-9]+)+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """A condition at one severity.

    when: the runs that have it. hold: how long they must have it before the alert fires.
    keep: how long the alert outlasts it. reason: why it waits so long, or does not.
    description: what happened to this run, with the marks of `descriptions`; the value is that of
    the first signal in `when`. triage: for the first line of a critical alert.
    counts_steps: whether that value is the number of consecutive steps that show it: it then began
    with the first of them. counted: the series of that number where the value is something else.
    """

    severity: Severity
    when: Predicate
    description: str
    hold: Duration | None = None
    keep: Duration | None = None
    reason: str = ""
    triage: Triage | None = None
    counts_steps: bool = False
    counted: Series | None = None

    @property
    def parts(self) -> tuple[Part, ...]:
        """The description, its parts by kind of mark."""
        labels = (*ALERT_LABELS, *kept_labels(self.when))
        return parse_description(self.severity.value, self.description, labels)

    @property
    def labels(self) -> dict[str, str]:
        """Labels that the rule adds to those of the run."""
        return {"severity": self.severity.value, "component": COMPONENT}

    @property
    def metrics(self) -> frozenset[Metric]:
        """The metrics that the level looks at."""
        return metrics_of(self.when)


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """Something that goes wrong in a run.

    summary: one fixed sentence. meaning: what it does to the training. confirm: how to verify it.
    remedies: what to do, the most promising first. why: why that works.
    levels: from the worst severity to the mildest; each fires by itself, and Alertmanager mutes
    the milder ones. quiet: what looks alike and must not fire, for the runbook; the tests
    have an example of each. guidance: the rest of the runbook.
    follows_from: names of the conditions that can cause it, the likeliest first.
    needs: what a training log must hold to judge it by; one of several sets is enough.
    usual: what it compares with a usual level, which a log must be long enough for.
    knobs: thresholds that `mp-agent tune` may move, the most direct first; of several, it takes
    the one that moves least. None where healthy runs do not have it, or durations alone decide.
    """

    name: str
    summary: str
    meaning: str
    confirm: str
    remedies: tuple[str, ...]
    why: str
    levels: tuple[Level, ...]
    quiet: tuple[str, ...]
    guidance: Guidance
    needs: tuple[tuple[Quantity, ...], ...]
    usual: Quantity | None = None
    follows_from: tuple[str, ...] = ()
    knobs: tuple[Knob, ...] = ()

    def __post_init__(self) -> None:
        problems = [*self._problems_of_text(), *self._problems_of_levels()]
        if problems:
            raise CatalogError(f"{self.name}: {'; '.join(problems)}")

    def annotations(
        self,
        level: Level,
        values: Values,
        runbook_base: str = "",
        dashboard_base: str = "",
    ) -> Mapping[str, str]:
        """Return the annotations of the rule for one level.

        Without a runbook base the run's node agent serves the runbook; without a dashboard base
        there is no such link.
        """
        runbook = agent_runbook_url(self.name)
        links = {
            "runbook_url": runbook_url(runbook_base, self.name) if runbook_base else runbook,
            "dashboard_url": dashboard_url(dashboard_base) if dashboard_base else "",
            "postmortem_url": postmortem_url() if level.severity is Severity.CRITICAL else "",
        }
        return {
            "summary": values.fill(self._first_line(level)),
            "description": prometheus_template(level.parts, values),
            "remedy": remedy_template(self.remedies),
            **{name: values.fill(url) for name, url in links.items() if url},
            "tracker_url": values.fill(tracker_url()),
            "step": values.fill(since_step_template(self.name)),
            **self._cause(level, values),
        }

    def _cause(self, level: Level, values: Values) -> Mapping[str, str]:
        if not level.triage or not self.follows_from:
            return {}
        return {"cause": values.fill(causes_template(self.name, self.follows_from))}

    def _first_line(self, level: Level) -> str:
        if level.triage is None:
            return self.summary
        return headline_template(self.name, self.summary, level.triage, self.follows_from)

    def _problems_of_text(self) -> list[str]:
        problems = []
        if not _NAME.fullmatch(self.name):
            problems.append("a name is MpAgent and capitalised words")
        texts = (self.summary, self.meaning, self.confirm, *self.remedies, self.why)
        if not self.remedies or not all(text.endswith(".") for text in texts):
            problems.append("summary, meaning, confirm, remedies and why are whole sentences")
        if self.remedies and isinstance(self.remedies[-1], Remedy):
            problems.append("the last remedy is for every run")
        if not self.quiet:
            problems.append("quiet names at least one case")
        if not self.needs or not all(self.needs):
            problems.append("needs name what a log must hold")
        if any("{" in text or "<" in text for text in texts):
            problems.append("only descriptions are templates")
        return problems

    def _problems_of_levels(self) -> list[str]:
        severities = [level.severity for level in self.levels]
        if not severities or severities != [known for known in Severity if known in severities]:
            return ["levels stand from the worst severity to the mildest, each once"]
        problems = [
            f"{level.severity.value} looks at no metric"
            for level in self.levels
            if not level.metrics
        ]
        problems += [
            f"{level.severity.value} has no triage, or one with whole sentences"
            for level in self.levels
            if not _is_triaged(level)
        ]
        for level in self.levels:
            try:
                _ = level.parts
            except CatalogError as error:
                problems.append(str(error))
        return problems


def _is_triaged(level: Level) -> bool:
    """Return whether a level that wakes people says what they need first."""
    if level.triage is None:
        return level.severity is not Severity.CRITICAL
    phrases = level.triage.texts
    return all(phrases[:2]) and not any(text.endswith(".") for text in phrases)
