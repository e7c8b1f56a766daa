"""Options of the commands that report: numbers within bounds, files to write, and what is shown."""

from collections.abc import Callable
from math import isfinite
from pathlib import Path
from typing import Any, Protocol, TypeVar

import click
from rich.console import Console as AnyConsole

from mp_agent.output import Console, OutputPath, write_whole

_Command = TypeVar("_Command", bound=Callable[..., Any])

_TABLE_WIDTH_MIN = 132
"""Columns of the terminal below which a table would be cut; a file gets as many."""


class Option(Protocol):
    """Adds an option to a command."""

    def __call__(self, command: _Command, /) -> _Command:
        """Return the command."""


class FiniteRange(click.FloatRange):
    """A number within bounds; neither NaN, which is within all of them, nor infinity."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the number."""
        number = super().convert(value, param, ctx)
        if not isfinite(number):
            self.fail(f"{value} is not finite.", param, ctx)
        return number


def count_option(name: str, default: int, help: str, *, least: int = 1) -> Option:
    """Return an option with a whole number from `least` up."""
    kind = click.IntRange(min=least)
    return click.option(name, type=kind, default=default, show_default=True, help=help)


def positive_option(name: str, default: float, help: str) -> Option:
    """Return an option with a positive number."""
    kind = FiniteRange(min=0, min_open=True)
    return click.option(name, type=kind, default=default, show_default=True, help=help)


def file_option(*names: str, help: str, exists: bool = False) -> Option:
    """Return an option with a file: to write, or one that exists."""
    kind = click.Path(path_type=Path, dir_okay=False, exists=True) if exists else OutputPath()
    return click.option(*names, type=kind, help=help)


def json_option(what: str) -> Option:
    """Return the option that prints JSON."""
    return click.option("--json", "as_document", is_flag=True, help=f"Print the {what} as JSON.")


def page_option(what: str, drawn: str = "plots") -> Option:
    """Return the option that writes a page."""
    return file_option("--html", "page", help=f"Write the {what}, with {drawn}, to one HTML file.")


def show(
    *,
    json: Callable[[], str],
    html: Callable[[], str],
    text: Callable[[AnyConsole], None],
    as_document: bool,
    page: Path | None,
) -> None:
    """Write the page that is asked for; print JSON, else where the page is, else the text."""
    if page is not None:
        write_whole(page, html())
    if as_document:
        click.echo(json())
    elif page is not None:
        click.echo(str(page))
    else:
        text(Console())


def wide_console() -> Console:
    """Return a console for wide tables, which a file or a pipe holds in full."""
    console = Console()
    return console if console.is_terminal else Console(width=max(console.width, _TABLE_WIDTH_MIN))
