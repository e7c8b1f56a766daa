"""The pages of the documentation, and the code blocks in them."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    [
        *(ROOT / "docs").rglob("*.md"),
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        ROOT / "helm" / "mp-agent" / "README.md",
    ]
)

_BLOCK = re.compile(
    r"^(?P<mark><!-- run -->\n)?(?P<indent> *)```(?P<language>\w*)\n(?P<text>.*?)^(?P=indent)```$",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block. `executed` when it is marked to be run."""

    page: Path
    line: int
    language: str
    text: str
    executed: bool

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(*languages: str) -> list[Block]:
    """Return the blocks in these languages; all of them when none is named."""
    found = (block for page in PAGES for block in _blocks_of(page))
    return [block for block in found if not languages or block.language in languages]


def _blocks_of(page: Path) -> Iterator[Block]:
    text = page.read_text("utf-8")
    for found in _BLOCK.finditer(text):
        yield Block(
            page=page,
            line=text.count("\n", 0, found.start()) + 1,
            language=found["language"],
            text=found["text"],
            executed=found["mark"] is not None,
        )


def prose(page: Path) -> str:
    """Return a page without its code blocks."""
    return _BLOCK.sub("", page.read_text("utf-8"))
