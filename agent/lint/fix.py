"""Applies the edits of findings, and nothing else, to the files."""

import ast
from collections.abc import Iterable, Mapping
from itertools import groupby
from pathlib import Path

from mp_agent.lint.finding import CodeFinding, Edit, Span
from mp_agent.lint.source.files import decoded, encoding_of, read_bytes
from mp_agent.lint.source.text import SourceText
from mp_agent.output import write_whole


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
