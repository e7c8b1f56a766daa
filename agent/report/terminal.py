"""Reports in a terminal: tables, headings and notes of one look.

Texts come from models, logs and servers: none is read as rich's markup.
"""

from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING

from rich.padding import Padding
from rich.panel import Panel
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from rich.console import Console

SEVERITIES = {"critical": "bold red", "warning": "yellow", "info": "cyan"}
"""How rich shows a severity."""


def table(*headings: str, right: Collection[str] = (), single: Collection[str] = ()) -> Table:
    """Return a table without lines, whose texts are folded where the terminal is narrow.

    right: headings of columns of numbers. single: of columns of one line, which ends in … where it
    is cut.
    """
    made = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", show_header=bool(headings))
    for heading in headings:
        made.add_column(
            heading,
            justify="right" if heading in right else "left",
            no_wrap=heading in single,
            overflow="ellipsis" if heading in single else "fold",
        )
    return made


def filled(
    headings: Sequence[str], rows: Iterable[Iterable[str]], right: Collection[str] = ()
) -> Table:
    """Return a table with rows of plain texts."""
    made = table(*headings, right=right)
    for row in rows:
        made.add_row(*map(Text, row))
    return made


def facts(pairs: Iterable[tuple[str, str]]) -> Table:
    """Return names and texts below each other."""
    made = table()
    made.add_column(style="dim")
    made.add_column(overflow="fold")
    for name, text in pairs:
        made.add_row(name, Text(text))
    return made


def verdict(text: str, *, good: bool) -> Panel:
    """Return the result of a report in a frame."""
    style = "green" if good else "red"
    return Panel(Text(text, style="bold"), border_style=style, expand=False)


def titled(content: Table, title: str) -> Panel:
    """Return a table in a frame with a title."""
    return Panel(content, title=Text(title), title_align="left", expand=False)


def heading(text: str) -> Rule:
    """Return the heading of a part."""
    return Rule(Text(text, style="bold"), align="left")


def indented(text: str, style: str = "") -> Padding:
    """Return a text that belongs to what is above it."""
    return Padding(Text(text, style=style), (0, 0, 0, 2))


def print_notes(console: "Console", notes: Iterable[str]) -> None:
    """Print remarks, each on a line of its own."""
    for note in notes:
        console.print(Text(f"Note: {note}", style="dim"))
