"""Notebooks: the code cells as one text, with the way back to cells."""

import json
import re
from bisect import bisect_right

from mp_agent.lint.source.files import UnreadableSource, decoded
from mp_agent.lint.source.text import SourceText

_MAGIC = re.compile(r"^(\s*)([%!?]|\w+\s*=\s*[%!])")


class NotebookText(SourceText):
    """The code cells of a notebook, one after the other; lines with magics are left out."""

    def __init__(self, cells: list[str]) -> None:
        self._starts: list[int] = []
        lines: list[str] = []
        for cell in cells:
            self._starts.append(len(lines) + 1)
            if cell.startswith("%%"):
                lines += ["\n"] * (cell.count("\n") + 1)
            else:
                lines += [_without_magic(line) + "\n" for line in cell.split("\n")]
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


def _without_magic(line: str) -> str:
    match = _MAGIC.match(line)
    return f"{match.group(1)}pass" if match else line.rstrip("\r")
