"""Findings as text, JSON, SARIF and GitHub annotations.

Findings as SARIF 2.1.0, which code hosts read.
https://docs.oasis-open.org/sarif/sarif/v2.1.0/sarif-v2.1.0.html
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

from rich.console import Console
from rich.text import Text

from mp_agent.inputs.files import printable
from mp_agent.lint.finding import CheckReport, CodeFinding, Edit, FindingSeverity, Rule, Span
from mp_agent.lint.rules import BY_CODE, RULES
from mp_agent.lint.source import SourceText, UnreadableSource, decoded, notebook_text, read_bytes
from mp_agent.report.numbers import counted
from mp_agent.version import __version__

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


def json_report(report: CheckReport) -> dict[str, Any]:
    """Return the report as a document; lines and columns count from 1."""
    return {
        "format": 1,
        "files": report.files,
        "counts": report.counts(),
        "findings": [_finding(finding) for finding in report.findings],
        "skipped": [{"path": one.path, "reason": one.reason} for one in report.skipped],
        "errors": [
            {"path": one.path, "rule": one.rule or None, "reason": one.reason}
            for one in report.errors
        ],
    }


def _finding(finding: CodeFinding) -> dict[str, Any]:
    rule = BY_CODE[finding.code]
    return {
        "path": finding.path,
        "cell": finding.cell,
        "line": finding.span.line,
        "column": finding.span.column + 1,
        "end_line": finding.span.end_line,
        "end_column": finding.span.end_column + 1,
        "code": finding.code,
        "name": rule.name,
        "severity": finding.severity.value,
        "message": finding.message,
        "remedy": rule.remedy,
        "alert": rule.alert or None,
        "fixable": bool(finding.edits),
    }


_SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
_DOCUMENTATION = "https://github.com/mp-agent/mp-agent/blob/main/docs/check-rules.md"
_INDEX = {rule.code: index for index, rule in enumerate(RULES)}


def sarif_report(report: CheckReport) -> dict[str, Any]:
    """Return the report as one SARIF run; columns count characters from 1."""
    return {
        "$schema": _SCHEMA,
        "version": "2.1.0",
        "runs": [
            {
                "tool": {
                    "driver": {
                        "name": "mp-agent check",
                        "version": __version__,
                        "informationUri": _DOCUMENTATION,
                        "rules": [_rule(rule) for rule in RULES],
                    }
                },
                "columnKind": "unicodeCodePoints",
                "results": [_result(finding) for finding in report.findings],
                "invocations": [
                    {
                        "executionSuccessful": not report.errors,
                        "toolExecutionNotifications": [
                            *(
                                _notification("warning", one.path, f"not checked: {one.reason}")
                                for one in report.skipped
                            ),
                            *(
                                _notification("error", one.path, one.message)
                                for one in report.errors
                            ),
                        ],
                    }
                ],
            }
        ],
    }


def _rule(rule: Rule) -> dict[str, Any]:
    return {
        "id": rule.code,
        "name": rule.name,
        "shortDescription": {"text": rule.summary},
        "fullDescription": {"text": rule.explanation},
        "help": {"text": rule.remedy},
        "helpUri": f"{_DOCUMENTATION}#{rule.code.lower()}-{rule.name}",
        "defaultConfiguration": {"level": rule.severity.value},
    }


def _result(finding: CodeFinding) -> dict[str, Any]:
    result: dict[str, Any] = {
        "ruleId": finding.code,
        "ruleIndex": _INDEX[finding.code],
        "level": finding.severity.value,
        "message": {"text": _message(finding)},
        "locations": [
            {
                "physicalLocation": {
                    "artifactLocation": {"uri": _uri(finding.path)},
                    "region": _region(finding.span),
                }
            }
        ],
    }
    if finding.edits:
        result["fixes"] = [_fix(finding)]
    return result


def _message(finding: CodeFinding) -> str:
    return finding.message if finding.cell is None else f"cell {finding.cell}: {finding.message}"


def _fix(finding: CodeFinding) -> dict[str, Any]:
    return {
        "artifactChanges": [
            {
                "artifactLocation": {"uri": _uri(finding.path)},
                "replacements": [_replacement(edit) for edit in finding.edits],
            }
        ]
    }


def _replacement(edit: Edit) -> dict[str, Any]:
    return {"deletedRegion": _region(edit.span), "insertedContent": {"text": edit.text}}


def _region(span: Span) -> dict[str, int]:
    return {
        "startLine": span.line,
        "startColumn": span.column + 1,
        "endLine": span.end_line,
        "endColumn": span.end_column + 1,
    }


def _notification(level: str, path: str, message: str) -> dict[str, Any]:
    return {
        "level": level,
        "message": {"text": message},
        "locations": [{"physicalLocation": {"artifactLocation": {"uri": _uri(path)}}}],
    }


def _uri(path: str) -> str:
    return Path(path).as_uri() if os.path.isabs(path) else quote(Path(path).as_posix())


_STYLES = {
    FindingSeverity.ERROR: "bold red",
    FindingSeverity.WARNING: "yellow",
    FindingSeverity.NOTE: "cyan",
}


def print_report(report: CheckReport, console: Console) -> None:
    """Print findings with excerpts, files that were skipped, and the totals."""
    sources: dict[str, SourceText | None] = {}
    shown_remedies: set[str] = set()
    for finding in report.findings:
        if finding.path not in sources:
            sources[finding.path] = _source(finding.path)
        console.print(_head(finding))
        source = sources[finding.path]
        if source is not None:
            console.print(_excerpt(finding, source))
        if finding.code not in shown_remedies:
            shown_remedies.add(finding.code)
            console.print(Text(f"    → {BY_CODE[finding.code].remedy}", "dim"))
    for skipped in report.skipped:
        console.print(
            Text.assemble(
                (printable(skipped.path), "bold"), (": not checked: ", "yellow"), skipped.reason
            )
        )
    for error in report.errors:
        console.print(
            Text.assemble((printable(error.path), "bold"), ": ", (error.message, "bold red"))
        )
    console.print(Text(_total(report), "bold"))


def _head(finding: CodeFinding) -> Text:
    cell = f":cell {finding.cell}" if finding.cell else ""
    position = f"{cell}:{finding.span.line}:{finding.span.column + 1}: "
    return Text.assemble(
        (printable(finding.path), "bold"),
        position,
        (finding.code, _STYLES[finding.severity]),
        f" {finding.message}",
    )


def _excerpt(finding: CodeFinding, source: SourceText) -> Text:
    """Return the first line of the finding, with its part underlined."""
    span = finding.span
    number = span.line
    if finding.cell is not None:
        number = source.line_in_text(finding.cell, span.line)
    line = source.line(number)
    end = span.end_column if span.end_line == span.line else len(line)
    # Tabs keep their width, so that the marks are below what they mean.
    indent = "".join(one if one == "\t" else " " for one in line[: span.column])
    marks = "^" * max(1, min(end, len(line)) - span.column)
    gutter = f"{span.line:>6} | "
    return Text.assemble(
        (gutter, "dim"), line, "\n", (" " * 6 + " | ", "dim"), indent, (marks, "bold red")
    )


def _source(path: str) -> SourceText | None:
    try:
        content = read_bytes(path)
        return notebook_text(content) if path.endswith(".ipynb") else SourceText(decoded(content))
    except (UnreadableSource, OSError):
        return None


def _total(report: CheckReport) -> str:
    if not report.findings and not report.skipped and not report.errors:
        return f"Nothing found in {counted(report.files, 'file')}."
    fixable = sum(bool(finding.edits) for finding in report.findings)
    hint = f", {fixable} of them fixable with --fix" if fixable else ""
    skipped = f"; {counted(len(report.skipped), 'file')} not checked" if report.skipped else ""
    found = counted(len(report.findings), "finding")
    errors = counted(len(report.errors), "internal error")
    failed = f"; {errors}, please report them" if report.errors else ""
    return f"{found} in {counted(report.files, 'file')}{hint}{skipped}{failed}."
