"""Sources of Python: files, notebooks, and the comments that suppress findings."""

import ast
import io
import json
import re
import tokenize
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from functools import cached_property

from mp_agent.inputs.files import read_file
from mp_agent.lint.finding import Span

_CODING_COMMENT = re.compile(r"#[^\r\n]*")
_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class SourceText:
    """Decoded source. Lines are those of Python's grammar: a form feed does not end one."""

    def __init__(self, text: str) -> None:
        self.text = text
        self._found: dict[re.Pattern[str], list[tuple[int, re.Match[str]]]] = {}

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

    def find(self, pattern: re.Pattern[str]) -> list[tuple[int, re.Match[str]]]:
        """Return number and first match of every line with a pattern; searched only once."""
        if pattern not in self._found:
            matches = ((number, pattern.search(line)) for number, line in enumerate(self.lines, 1))
            self._found[pattern] = [(number, match) for number, match in matches if match]
        return self._found[pattern]

    def identifiers(self) -> Iterable[str]:
        """Return every word outside comments that could be a name, in lower case."""
        return (
            word.lower() for word in set(_IDENTIFIER.findall(_CODING_COMMENT.sub("", self.text)))
        )

    def span(self, node: ast.expr | ast.stmt) -> Span:
        """Return where a node is, with columns in characters instead of bytes."""
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


_DECLARATION = re.compile(rb"^[ \t\f]*#.*?coding[:=][ \t]*([-\w.]+)")
MAX_BYTES = 8_000_000
"""Larger files are data: parsing one takes about 100 times its size in memory."""


class UnreadableSource(Exception):
    """A file cannot be read as Python; the message is the reason alone."""


def read_source(path: str) -> SourceText:
    """Return the decoded text of a file; raises UnreadableSource."""
    return SourceText(decoded(read_bytes(path)))


def read_bytes(path: str) -> bytes:
    """Return the content of a regular file; raises UnreadableSource."""
    try:
        return read_file(path, MAX_BYTES)
    except OSError as error:
        raise UnreadableSource(error.strerror or str(error)) from error


def encoding_of(content: bytes) -> str:
    """Return the encoding of source text; raises SyntaxError where it is unknown."""
    try:
        return tokenize.detect_encoding(io.BytesIO(content).readline)[0]
    except SyntaxError:
        # It wants the line of the declaration in UTF-8, which Python's parser does not.
        for line in content.splitlines()[:2]:
            if match := _DECLARATION.match(line):
                return match.group(1).decode()
        raise


def decoded(content: bytes) -> str:
    """Return source text as Python itself decodes it; raises UnreadableSource."""
    try:
        return content.decode(encoding_of(content))
    except (SyntaxError, UnicodeDecodeError, LookupError) as error:
        raise UnreadableSource(f"cannot be decoded: {error}") from error


_MAGIC = re.compile(r"^(\s*)([%!?]|[\w.,\s\[\]]+=\s*[%!]|[\w.*]+\?{1,2}\s*$)")
_TEXT_OR_COMMENT = re.compile(r"\"(?:\\.|[^\"\\])*\"|'(?:\\.|[^'\\])*'|#.*")
_LONG_TEXT = re.compile(r"(\"{3}|'{3}).*?\1", re.DOTALL)
_PYTHON_CELL = re.compile(r"%%(time|timeit|capture|prun|python|python3)\b")


class NotebookText(SourceText):
    """The code cells of a notebook, one after the other; lines with magics are left out."""

    def __init__(self, cells: list[str]) -> None:
        self._starts: list[int] = []
        lines: list[str] = []
        for cell in cells:
            self._starts.append(len(lines) + 1)
            first = cell.lstrip()  # IPython leaves out empty lines before a magic of the cell
            if first.startswith("%%") and not _PYTHON_CELL.match(first):
                lines += ["\n"] * (cell.count("\n") + 1)
            else:
                lines += _without_magics(cell)
        super().__init__("".join(lines))

    def cell_of(self, line: int) -> tuple[int, int]:
        """Return the code cell, counted from 1, and the line within it."""
        cell = bisect_right(self._starts, line)
        return cell, line - self._starts[cell - 1] + 1

    def line_in_text(self, cell: int, line: int) -> int:
        """Return the line of the whole text that is this line of a cell."""
        return self._starts[cell - 1] + line - 1


def notebook_text(content: bytes) -> NotebookText:
    """Return the code of a notebook; raises UnreadableSource."""
    try:
        document = json.loads(decoded(content))
        cells = [
            source if isinstance(source, str) else "".join(source)
            for cell in document["cells"]
            if cell["cell_type"] == "code"
            for source in [cell["source"]]
        ]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise UnreadableSource(f"is no notebook: {error}") from error
    return NotebookText(cells)


def _without_magics(cell: str) -> Iterator[str]:
    """Yield lines with `pass` for magics, and empty ones for those on which a command goes on.

    Within brackets, `%` is an operator, and texts of several lines hold neither.
    """
    goes_on, depth = False, 0
    shown = _LONG_TEXT.sub(lambda text: '""' + "\n" * text.group().count("\n"), cell).split("\n")
    for line, code in zip(cell.split("\n"), shown, strict=True):
        match = _MAGIC.match(code) if depth <= 0 else None
        if match is None and not goes_on:
            code = _TEXT_OR_COMMENT.sub("", code)
            depth += sum(map(code.count, "([{")) - sum(map(code.count, ")]}"))
        if goes_on:
            yield "\n"
        else:
            yield (f"{match.group(1)}pass" if match else line.rstrip("\r")) + "\n"
        goes_on = (goes_on or match is not None) and line.rstrip().endswith("\\")


_COMMENT = re.compile(r"#\s*mp-agent:\s*ignore(-file)?(?:\[([^\]]*)\])?(?![\w\[-])")


class Suppressions:
    """What the comments of one file silence."""

    def __init__(self, source: SourceText) -> None:
        self._of_file: list[frozenset[str]] = []
        self._of_line: dict[int, list[frozenset[str]]] = {}
        if "mp-agent:" not in source.text:
            return
        for number, line in enumerate(source.lines, 1):
            for match in _COMMENT.finditer(line):
                codes = frozenset(re.findall(r"\w+", match.group(2) or ""))
                if match.group(1):
                    self._of_file.append(codes)
                else:
                    self._of_line.setdefault(number, []).append(codes)

    def silence(self, span: Span, code: str) -> bool:
        """Return whether a comment on the first or the last line, or for the file, names a code.

        A comment without codes stands for all of them.
        """
        lines = (self._of_line.get(number, []) for number in (span.line, span.end_line))
        named = [*self._of_file, *(codes for line in lines for codes in line)]
        return any(not codes or code in codes for codes in named)
