"""Findings as annotations of a GitHub workflow."""

from collections.abc import Iterator

from mp_agent.inputs.texts import printable
from mp_agent.lint.results import CheckReport
from mp_agent.lint.rules import BY_CODE

_COMMANDS = {"error": "error", "warning": "warning", "note": "notice"}


def github_lines(report: CheckReport) -> Iterator[str]:
    """Yield one workflow command per finding, file that was skipped, and internal error."""
    for finding in report.findings:
        span = finding.span
        properties = {"title": f"{finding.code} {BY_CODE[finding.code].name}"}
        if finding.cell is None:
            properties = {
                "line": str(span.line),
                "endLine": str(span.end_line),
                "col": str(span.column + 1),
                "endColumn": str(span.end_column + 1),
                **properties,
            }
        yield _command(_COMMANDS[finding.severity.value], finding.path, properties, finding.message)
    for skipped in report.skipped:
        yield _command("warning", skipped.path, {"title": "not checked"}, skipped.reason)
    for error in report.errors:
        yield _command("error", error.path, {"title": "internal error"}, error.message)


def _command(command: str, path: str, properties: dict[str, str], message: str) -> str:
    parts = {"file": path, **properties}
    text = ",".join(f"{name}={_escaped_property(value)}" for name, value in parts.items())
    return f"::{command} {text}::{_escaped(message)}"


def _escaped(text: str) -> str:
    shown = printable(text, keep="\r\n")
    return shown.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _escaped_property(text: str) -> str:
    return _escaped(text).replace(":", "%3A").replace(",", "%2C")
