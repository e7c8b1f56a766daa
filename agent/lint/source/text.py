"""The text of one source file, by lines, with conversions of columns."""

import ast
import re
from collections.abc import Iterable
from functools import cached_property

from mp_agent.lint.finding import Span

_COMMENT = re.compile(r"#[^\r\n]*")
_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class SourceText:
    """Decoded source. Lines are those of Python's grammar: a form feed does not end one."""

    def __init__(self, text: str) -> None:
        self.text = text

    @cached_property
    def lines(self) -> list[str]:
        """Lines with their endings."""
        return self.text.splitlines(keepends=True) if self._plain else _python_lines(self.text)

    @property
    def _plain(self) -> bool:
        return not any(mark in self.text for mark in "\f\v\x1c\x1d\x1e\x85\u2028\u2029")

    def line(self, number: int) -> str:
        """Return a line without its ending; lines count from 1."""
        return self.lines[number - 1].rstrip("\r\n") if 0 < number <= len(self.lines) else ""

    def line_in_text(self, cell: int, line: int) -> int:
        """Return the line of the whole text that is this line of a cell; there are no cells."""
        return line

    def matches(self, pattern: re.Pattern[str], first: int, last: int) -> bool:
        """Return whether a pattern occurs in a range of lines, both included."""
        return pattern.search("".join(self.lines[first - 1 : last])) is not None

    def identifiers(self) -> Iterable[str]:
        """Return every word outside comments that could be a name, in lower case."""
        return (word.lower() for word in set(_IDENTIFIER.findall(_COMMENT.sub("", self.text))))

    def span(self, node: ast.expr | ast.stmt) -> Span:
        """Return where a node stands, with columns in characters instead of bytes."""
        end_line = node.end_lineno or node.lineno
        return Span(
            node.lineno,
            self._column(node.lineno, node.col_offset),
            end_line,
            self._column(end_line, node.end_col_offset or node.col_offset),
        )

    def _column(self, line: int, offset: int) -> int:
        text = self.lines[line - 1] if 0 < line <= len(self.lines) else ""
        return offset if text.isascii() else len(text.encode()[:offset].decode(errors="ignore"))

    def excerpt(self, span: Span) -> str:
        """Return the text of a span."""
        if span.line == span.end_line:
            return self.line(span.line)[span.column : span.end_column]
        parts = [self.lines[span.line - 1][span.column :]]
        parts += self.lines[span.line : span.end_line - 1]
        parts.append(self.lines[span.end_line - 1][: span.end_column])
        return "".join(parts)


def _python_lines(text: str) -> list[str]:
    return re.findall(r"[^\r\n]*(?:\r\n|\r|\n)|[^\r\n]+", text)
