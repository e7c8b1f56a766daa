"""Findings as JSON, for programs."""

from typing import Any

from mp_agent.lint.finding import CodeFinding
from mp_agent.lint.results import CheckReport
from mp_agent.lint.rules import BY_CODE


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
