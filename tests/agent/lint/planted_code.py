"""The planted mistakes of `planted/*.txt`: variants with marked lines, and clean counterparts."""

import re
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).with_name("planted")
_HEAD = re.compile(r"^=== (variant|clean): (.*)$")
_FILE = re.compile(r"^=== file: (.*)$")
_MARK = "  # !"


@dataclass(frozen=True)
class Planted:
    """One variant: files, and the lines on which the rule must report."""

    code: str
    title: str
    clean: bool
    files: dict[str, str]
    expected: frozenset[tuple[str, int]]

    def __str__(self) -> str:
        return f"{self.code}: {'clean, ' if self.clean else ''}{self.title}"


def planted() -> list[Planted]:
    return [one for path in sorted(FOLDER.glob("*.txt")) for one in _of_file(path)]


def _of_file(path: Path) -> list[Planted]:
    found: list[tuple[str, str, dict[str, list[str]]]] = []
    name = "main.py"
    for line in path.read_text("utf-8").splitlines():
        if head := _HEAD.match(line):
            found.append((head[1], head[2], {}))
            name = "main.py"
        elif file := _FILE.match(line):
            name = file[1]
        else:
            found[-1][2].setdefault(name, []).append(line)
    return [_planted(path.stem, *one) for one in found]


def _planted(code: str, kind: str, title: str, files: dict[str, list[str]]) -> Planted:
    expected = frozenset(
        (name, number)
        for name, lines in files.items()
        for number, line in enumerate(lines, 1)
        if line.endswith(_MARK)
    )
    texts = {
        name: "".join(line.removesuffix(_MARK) + "\n" for line in lines)
        for name, lines in files.items()
    }
    return Planted(code, title, kind == "clean", texts, expected)
