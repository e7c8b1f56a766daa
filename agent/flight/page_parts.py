"""Pieces of HTML that a post-mortem's page is made of."""

from collections.abc import Iterable, Sequence
from html import escape


def section(title: str, content: str) -> str:
    """Return a part of the page under its heading."""
    return f"<section><h2>{escape(title)}</h2>{content}</section>"


def figure(title: str, note: str, plot: str) -> str:
    """Return a plot below its title and a note."""
    head = f"<strong>{escape(title)}</strong> " if title else ""
    return f"<figure><figcaption>{head}{escape(note)}</figcaption>{plot}</figure>"


def table(
    headings: Sequence[str],
    rows: Sequence[Sequence[str]],
    marked: Iterable[int] = (),
    *,
    kind: str = "",
) -> str:
    """Return a table; marked: indices of the rows that stand out."""
    head = "".join(f"<th>{escape(heading)}</th>" for heading in headings)
    chosen = set(marked)
    body = "".join(
        f"<tr{' class=marked' if index in chosen else ''}>"
        + "".join(f"<td>{escape(cell)}</td>" for cell in row)
        + "</tr>"
        for index, row in enumerate(rows)
    )
    rows_html = f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody>"
    return f'<div class="scroll"><table class="{kind}">{rows_html}</table></div>'
