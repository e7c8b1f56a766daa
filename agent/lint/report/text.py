"""Findings for a terminal, with the source around each."""

from rich.console import Console
from rich.text import Text

from mp_agent.inputs.texts import printable
from mp_agent.lint.finding import CodeFinding, FindingSeverity
from mp_agent.lint.results import CheckReport
from mp_agent.lint.rules import BY_CODE
from mp_agent.lint.source.files import UnreadableSource, decoded, read_bytes
from mp_agent.lint.source.notebook import notebook_text
from mp_agent.lint.source.text import SourceText

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
    # Tabs keep their width, so that the marks stand below what they mean.
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
        return f"Nothing found in {_counted(report.files, 'file')}."
    fixable = sum(bool(finding.edits) for finding in report.findings)
    hint = f", {fixable} of them fixable with --fix" if fixable else ""
    skipped = f"; {_counted(len(report.skipped), 'file')} not checked" if report.skipped else ""
    found = _counted(len(report.findings), "finding")
    errors = _counted(len(report.errors), "internal error")
    failed = f"; {errors}, please report them" if report.errors else ""
    return f"{found} in {_counted(report.files, 'file')}{hint}{skipped}{failed}."


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
