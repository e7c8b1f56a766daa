"""Which files a check looks at."""

import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from mp_agent.errors import SettingError

SUFFIXES = (".py", ".ipynb")
_NEVER = frozenset({"__pycache__", "node_modules", "site-packages", "venv", "env"})


def find_files(paths: Iterable[str], excluded: Callable[[str], bool]) -> list[str]:
    """Return the files below the paths, each once, in a fixed order.

    Folders are searched for Python files and notebooks, except in hidden ones and in environments;
    links to folders are not followed. A file that is named is taken whatever its name. Raises
    SettingError when a path does not exist.
    """
    found: dict[str, str] = {}
    for path in paths:
        if os.path.isdir(path):
            for file in _walk(path):
                if not excluded(file):
                    found.setdefault(os.path.realpath(file), file)
        elif os.path.exists(path):
            found.setdefault(os.path.realpath(path), path)
        else:
            raise SettingError(f"{path!r} does not exist")
    return sorted(found.values())


def _walk(folder: str) -> Iterator[str]:
    for parent, folders, files in os.walk(folder):
        folders[:] = sorted(
            name for name in folders if not name.startswith(".") and name not in _NEVER
        )
        for name in sorted(files):
            if name.endswith(SUFFIXES):
                yield os.path.normpath(os.path.join(parent, name))


def relative(path: str, base: Path) -> str:
    """Return a path relative to a folder, with slashes; as it is where it lies elsewhere."""
    try:
        return Path(os.path.abspath(path)).relative_to(base).as_posix()
    except ValueError:
        return Path(path).as_posix()
