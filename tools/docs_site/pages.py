"""Which pages the site has, and where each belongs: the index of the documentation says so."""

import os
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
INDEX = "docs/index"
"""The page that leads to all others, by sections."""

OVERVIEWS = ("docs/frameworks/index", "alerting/runbooks/README")
"""Pages that list the other pages of their folder, which belong below them."""

PATTERNS = (
    "*.md",
    "docs/**.md",
    "alerting/runbooks/*.md",
    "helm/mp-agent/README.md",
)
"""The files that are pages of the site."""

_SECTION = re.compile(r"^## (.+)$", re.MULTILINE)
_LINK = re.compile(r"\]\((?!https?:)([^)\s#]+)\.md(?:#[^)\s]*)?\)")


def toctrees(page: str, text: str) -> str:
    """Return the directives that place the pages below `page`, in the order of its links.

    Empty for a page that has none below it.
    """
    if page == INDEX:
        parts = _SECTION.split(text)[1:]
        below: set[str] = set()
        trees = []
        for title, section in zip(parts[::2], parts[1::2], strict=True):
            linked = [one for one in _linked(page, section) if not _below_overview(one)]
            trees.append(_toctree(title, [one for one in linked if one not in below]))
            below.update(linked)
        return "".join(trees)
    if page in OVERVIEWS:
        return _toctree("", [one for one in _linked(page, text) if _folder(one) == _folder(page)])
    return ""


def _linked(page: str, text: str) -> Iterator[str]:
    """Yield the pages that a text of `page` links to, each once."""
    targets = (os.path.normpath(f"{_folder(page)}/{path}") for path in _LINK.findall(text))
    yield from dict.fromkeys(target for target in targets if target != page)


def _below_overview(page: str) -> bool:
    return page not in OVERVIEWS and _folder(page) in map(_folder, OVERVIEWS)


def _folder(page: str) -> str:
    return page.rpartition("/")[0]


def _toctree(title: str, pages: list[str]) -> str:
    caption = f":caption: {title}\n" if title else ""
    entries = "\n".join(f"/{page}" for page in pages)
    return f"\n```{{toctree}}\n:hidden:\n{caption}\n{entries}\n```\n"
