"""`mp-agent check`: reports findings, and applies their edits when asked to."""

import ast
import io
import json
import os
import sys
from collections.abc import Iterable, Mapping
from itertools import groupby
from pathlib import Path

import click

from mp_agent.errors import SettingError
from mp_agent.inputs.files import printable
from mp_agent.lint.finding import CheckReport, CodeFinding, Edit, Span
from mp_agent.lint.report import github_lines, json_report, print_report, sarif_report
from mp_agent.lint.rules import BY_CODE, RULES
from mp_agent.lint.runner import check_paths, inputs_of
from mp_agent.lint.source import SourceText, decoded, encoding_of, read_bytes
from mp_agent.output import Console, OutputPath, keep_inputs, write_whole


def apply_fixes(findings: Iterable[CodeFinding]) -> Mapping[str, int]:
    """Edit files in place; return the number of findings fixed in each.

    Everything but the edits stays as it was, the encoding and the line endings included. Edits
    that overlap others wait for the next call. A file that would no longer parse is left alone.
    Raises click.ClickException, naming the file, when it cannot be written.
    """
    fixed: dict[str, int] = {}
    ordered = sorted((one for one in findings if one.edits), key=lambda one: one.sort_key)
    for path, group in groupby(ordered, key=lambda one: one.path):
        content = read_bytes(path)
        encoding = encoding_of(content)
        text, count = _edited(decoded(content), [finding.edits for finding in group])
        if count and _parses(text):
            write_whole(Path(path), text, encoding=encoding, errors="strict")
            fixed[path] = count
    return fixed


def _edited(text: str, fixes: list[tuple[Edit, ...]]) -> tuple[str, int]:
    """Return the text with the fixes that do not overlap, and their number."""
    source = SourceText(text)
    starts = [0]
    for line in source.lines:
        starts.append(starts[-1] + len(line))
    taken: list[tuple[int, int, str]] = []
    count = 0
    for edits in fixes:
        wanted = [(*_range(edit.span, starts), edit.text) for edit in edits]
        if any(_overlap(one, other) for one in wanted for other in taken):
            continue
        taken += wanted
        count += 1
    for start, end, replacement in sorted(taken, reverse=True):
        text = text[:start] + replacement + text[end:]
    return text, count


def _range(span: Span, starts: list[int]) -> tuple[int, int]:
    return starts[span.line - 1] + span.column, starts[span.end_line - 1] + span.end_column


def _overlap(one: tuple[int, int, str], other: tuple[int, int, str]) -> bool:
    return (one[0] < other[1] and other[0] < one[1]) or one[:2] == other[:2]


def _parses(text: str) -> bool:
    try:
        ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True


_INTERNAL_ERROR = 3


def _codes(context: click.Context, option: click.Parameter, value: tuple[str, ...]) -> list[str]:
    """Return codes that were given one by one or separated by commas."""
    return [code for text in value for code in text.replace(",", " ").split()]


@click.command("check")
@click.argument("paths", nargs=-1, metavar="PATH…")
@click.option(
    "--select", multiple=True, metavar="CODES", callback=_codes, help="Apply these rules only."
)
@click.option(
    "--ignore", multiple=True, metavar="CODES", callback=_codes, help="Leave out these rules."
)
@click.option(
    "--format",
    "output_format",
    type=click.Choice(["text", "json", "sarif", "github"]),
    default="text",
    show_default=True,
    help="How to print the findings.",
)
@click.option(
    "--output",
    type=OutputPath(),
    help="Write the findings to this file instead.",
)
@click.option("--fix", is_flag=True, help="Fix what can be fixed safely, in place.")
@click.option(
    "--jobs",
    type=click.IntRange(min=1),
    default=lambda: os.cpu_count() or 1,
    show_default="one per processor",
    help="Processes that share the files.",
)
@click.option("--exit-zero", is_flag=True, help="Exit with 0 even if there are findings.")
@click.option("--explain", metavar="CODE", help="Explain a rule, with examples, and exit.")
def check_command(
    paths: tuple[str, ...],
    select: list[str],
    ignore: list[str],
    output_format: str,
    output: Path | None,
    fix: bool,
    jobs: int,
    exit_zero: bool,
    explain: str | None,
) -> None:
    """Find mistakes in training code, in its precision and its loop, before it runs.

    Checks Python files and notebooks below PATH, by default of the current folder, without
    running them. Settings come from [tool.mp-agent.check] in pyproject.toml; a comment
    `# mp-agent: ignore[MP101]` silences a line. The exit code is 0 if there is nothing to report,
    1 if there is (a finding, or a file that cannot be parsed), 2 for invalid arguments, 3 if a rule
    itself failed; what the other rules found is reported all the same.
    """
    if explain is not None:
        click.echo(_explanation(explain))
        return
    try:
        if output is not None:
            keep_inputs(inputs_of(paths or (".",)), output)
        report = check_paths(paths or (".",), select=select, ignore=ignore, jobs=jobs)
        if fix:
            fixed = apply_fixes(report.findings)
            if fixed:
                report = check_paths(paths or (".",), select=select, ignore=ignore, jobs=jobs)
                for path, count in fixed.items():
                    click.echo(f"{path}: {count} fixed", err=True)
    except SettingError as error:
        raise click.UsageError(str(error)) from error
    if not report.files:
        where = ", ".join(paths) or "the current folder"
        text = f"mp-agent check: warning: no Python file or notebook was found in {where}"
        click.echo(printable(text), err=True)
    _write(report, output_format, output)
    sys.exit(_exit_code(report, exit_zero))


def _exit_code(report: CheckReport, exit_zero: bool) -> int:
    if report.errors:
        return _INTERNAL_ERROR
    return int(bool(report.findings or report.skipped) and not exit_zero)


def _write(report: CheckReport, output_format: str, output: Path | None) -> None:
    if output_format == "text" and output is None:
        print_report(report, Console(soft_wrap=True, highlight=False))
        return
    text = _text(report, output_format)
    if output is None:
        click.echo(text, nl=False)
    else:
        write_whole(output, text)


def _text(report: CheckReport, output_format: str) -> str:
    if output_format == "json":
        return json.dumps(json_report(report), indent=1) + "\n"
    if output_format == "sarif":
        return json.dumps(sarif_report(report), indent=1) + "\n"
    if output_format == "github":
        return "".join(f"{line}\n" for line in github_lines(report))
    written = io.StringIO()
    print_report(report, Console(soft_wrap=True, highlight=False, file=written))
    return written.getvalue()


def _explanation(code: str) -> str:
    rule = BY_CODE.get(code.upper())
    if rule is None:
        known = ", ".join(one.code for one in RULES)
        raise click.BadParameter(f"{code!r} is no rule; there are {known}", param_hint="--explain")
    alert = f"Alert in a run: {rule.alert}." if rule.alert else f"No alert: {rule.no_alert}"
    parts = [
        f"{rule.code} {rule.name}: {rule.summary}",
        rule.explanation,
        f"Instead of:\n\n{_indented(rule.bad)}",
        f"write:\n\n{_indented(rule.good)}",
        f"Remedy: {rule.remedy}",
        alert,
    ]
    return "\n\n".join(parts)


def _indented(text: str) -> str:
    return "".join(
        f"    {line}" if line.strip() else line for line in text.splitlines(True)
    ).rstrip()
