"""Findings as SARIF 2.1.0, which code hosts read.

https://docs.oasis-open.org/sarif/sarif/v2.1.0/sarif-v2.1.0.html
"""

import os
from pathlib import Path
from typing import Any
from urllib.parse import quote

from mp_agent.lint.finding import CodeFinding, Edit, Span
from mp_agent.lint.results import CheckReport
from mp_agent.lint.rule import Rule
from mp_agent.lint.rules import RULES
from mp_agent.version import __version__

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
