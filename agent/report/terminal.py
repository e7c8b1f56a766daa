"""Reports in a terminal: tables, headings and notes of one look.

Texts come from models, logs and servers: none is read as rich's markup.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING

import rich.table
from rich.padding import Padding
from rich.panel import Panel
from rich.rule import Rule
from rich.text import Text

from mp_agent.report.content import TONES, Table

if TYPE_CHECKING:
    from rich.console import Console

_STYLES = {"good": "bold green", "bad": "bold red", "warn": "yellow", "info": "cyan"}
"""How rich shows a tone."""
SEVERITIES = {severity: _STYLES[tone] for severity, tone in TONES.items() if severity}
"""How rich shows a severity."""


def table(content: Table, *, single: bool = False) -> rich.table.Table:
    """Return a table without lines, whose texts are folded where the terminal is narrow.

    single: one line for each row; what is cut ends in ….
    """
    made = grid()
    made.show_header = any(content.headings)
    for index, heading in enumerate(content.headings):
        made.add_column(
            heading,
            justify="left" if index in content.text else "right",
            no_wrap=single,
            overflow="ellipsis" if single else "fold",
        )
    for index, row in enumerate(content.rows):
        cells = [
            Text(cell) if isinstance(cell, str) else Text(cell.text, _STYLES.get(cell.tone, ""))
            for cell in row
        ]
        made.add_row(*cells, style=_STYLES["bad"] if index in content.marked else "")
    return made


def grid() -> rich.table.Table:
    """Return a table without lines, headings and rows, for cells of several styles."""
    return rich.table.Table(box=None, padding=(0, 2, 0, 0), header_style="dim", show_header=False)


def facts(pairs: Iterable[tuple[str, str]]) -> rich.table.Table:
    """Return names and texts below each other."""
    made = grid()
    made.add_column(style="dim")
    made.add_column(overflow="fold")
    for name, text in pairs:
        made.add_row(name, Text(text))
    return made


def verdict(text: str, *, good: bool) -> Panel:
    """Return the result of a report in a frame."""
    style = "green" if good else "red"
    return Panel(Text(text, style="bold"), border_style=style, expand=False)


def titled(content: rich.table.Table, title: str) -> Panel:
    """Return a table in a frame with a title."""
    return Panel(content, title=Text(title), title_align="left", expand=False)


def heading(text: str) -> Rule:
    """Return the heading of a part."""
    return Rule(Text(text, style="bold"), align="left")


def indented(text: str, style: str = "") -> Padding:
    """Return a text that belongs to what is above it."""
    return Padding(Text(text, style=style), (0, 0, 0, 2))


def print_notes(console: "Console", notes: Iterable[str]) -> None:
    """Print remarks, each on its own line."""
    for note in notes:
        console.print(Text(f"Note: {note}", style="dim"))
