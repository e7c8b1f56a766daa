"""Run scope: mistakes in the code of the run, found without running it."""

from collections.abc import Mapping

from mp_agent.catalog.metric import Kind, Metric, Reading, Scope
from mp_agent.records.views import RunView


def _findings(run: RunView) -> Reading:
    counts: Mapping[str, int] = {} if run.script is None else run.script.counts
    return {(rule,): float(count) for rule, count in counts.items()}


CODE_METRICS = (
    Metric(
        name="mp_agent.lint.findings",
        unit="{finding}",
        kind=Kind.GAUGE,
        scope=Scope.RUN,
        labels=("rule",),
        help="Mixed-precision mistakes that the rule finds in the main script and what it imports "
        "of its project; only with the setting check_script.",
        read=_findings,
    ),
    Metric(
        name="mp_agent.lint.files",
        unit="{file}",
        kind=Kind.GAUGE,
        scope=Scope.RUN,
        help="Files of the main script's project that were checked for mixed-precision mistakes; "
        "0 if the check failed; absent without the setting check_script.",
        read=lambda run: None if run.script is None else float(run.script.files),
    ),
)
