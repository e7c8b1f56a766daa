"""A proposal as files: settings of agents and commands, and values of the chart."""

from collections.abc import Iterable
from typing import Any

import yaml

from mp_agent.backtest.tuning.knobs import Proposal
from mp_agent.backtest.tuning.search import ThresholdChange


def settings_text(
    proposal: Proposal, heading: Iterable[str], changes: Iterable[ThresholdChange]
) -> str:
    """Return the settings file that node agents, `mp-agent rules` and `backtest` take."""
    table: dict[str, Any] = {}
    if proposal.thresholds:
        table["thresholds"] = dict(proposal.thresholds)
    if proposal.severities:
        table["alerts"] = dict(proposal.severities)
    return _commented(heading, changes) + _yaml(table)


def chart_values_text(
    proposal: Proposal, heading: Iterable[str], changes: Iterable[ThresholdChange]
) -> str:
    """Return the same as values of the chart, which gives them to rules, dashboards and jobs."""
    rules: dict[str, Any] = {}
    if proposal.thresholds:
        rules["thresholds"] = dict(proposal.thresholds)
    for name, severity in proposal.severities.items():
        condition, _, level = name.partition(".")
        rules.setdefault("severities", {}).setdefault(condition, {})[level] = severity
    return _commented(heading, changes) + _yaml({"rules": rules} if rules else {})


def _commented(heading: Iterable[str], changes: Iterable[ThresholdChange]) -> str:
    lines = [*heading, *(_reason(change) for change in changes)]
    return "".join(f"# {line}\n" for line in lines)


def _reason(change: ThresholdChange) -> str:
    runs = ", ".join(change.runs[:3]) + (", …" if len(change.runs) > 3 else "")
    text = f"{change.name}: {change.before} -> {change.proposed}; {change.condition} of {runs}"
    if change.limit is None:
        return f"{text}; no threshold stops it"
    return f"{text}; stops at {change.limit:g}, margin {change.margin:.3g}"


def _yaml(table: dict[str, Any]) -> str:
    # `off` would be read as a boolean unless it is quoted, which the dumper does.
    return yaml.safe_dump(table, sort_keys=False) if table else "{}\n"
