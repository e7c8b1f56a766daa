"""The tables of the README, from the catalogs."""

from collections.abc import Iterable
from unittest.mock import patch

from mp_agent.alerting.conditions import CONDITIONS
from mp_agent.catalog.metrics import METRICS, Scope
from mp_agent.settings import ENV_PREFIX, Settings

_SCOPE_NOTES = {
    Scope.RUN: "by the node agent beside rank 0",
    Scope.LAYER: "by the node agent beside rank 0",
    Scope.RANK: "by each node agent, for its own ranks",
    Scope.AGENT: "by each node agent, of itself",
}


def metrics_table() -> str:
    """Return one Markdown table per scope."""
    return "\n\n".join(_scope_table(scope) for scope in Scope)


def _scope_table(scope: Scope) -> str:
    labels = ", ".join(f"`{label}`" for label in scope.value)
    rows = (
        (
            f"`{metric.prometheus_name}`" + _braces(metric.labels),
            metric.kind.value,
            metric.help,
        )
        for metric in METRICS
        if metric.scope is scope
    )
    title = f"**{scope.name.capitalize()}** (labels {labels}; exported {_SCOPE_NOTES[scope]})"
    return f"{title}\n\n{_markdown(('metric', 'kind', 'meaning'), rows)}"


def alerts_table() -> str:
    """Return the alerts with their severities and first remedy."""
    rows = (
        (
            f"`{condition.name}`",
            ", ".join(level.severity.value for level in condition.levels),
            condition.summary,
            condition.remedies[0],
        )
        for condition in CONDITIONS
    )
    return _markdown(("alert", "severity", "what", "first remedy"), rows)


def settings_table() -> str:
    """Return the settings with their defaults."""
    rows = (
        (
            f"`{name}`",
            f"`{ENV_PREFIX}{name.upper()}`",
            f"`{_default(name)}`",
            field.description or "",
        )
        for name, field in Settings.model_fields.items()
    )
    return _markdown(("setting", "variable", "default", "meaning"), rows)


def _default(name: str) -> str:
    """Return a default in general form, whoever the user is that runs this."""
    temporary = patch("tempfile.tempdir", "/<temporary directory>")
    with temporary, patch("os.getuid", return_value="<uid>"):
        value = Settings.model_fields[name].get_default(call_default_factory=True)
    shown = ",".join(value) if isinstance(value, tuple) else str(value)
    return shown.replace("/<temporary directory>", "<temporary directory>")


def _braces(labels: tuple[str, ...]) -> str:
    return " {" + ", ".join(f"`{label}`" for label in labels) + "}" if labels else ""


def _markdown(header: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [header, tuple("---" for _ in header), *rows]
    return "\n".join(
        "| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines
    )
