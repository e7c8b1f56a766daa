"""Fetch the status page's chart library from npm, or check what is committed against it.

Run: python -m tools.vendor [--check]. It needs npm; nothing else in the project does.
"""

import argparse
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Mapping
from pathlib import Path

ASSETS = Path(__file__).parent.parent / "agent" / "report" / "assets"
PACKAGE = "uplot@1.6.32"
FILES = {
    "dist/uPlot.iife.min.js": "uplot.js",
    "dist/uPlot.min.css": "uplot.css",
    "LICENSE": "uplot.LICENSE",
}
"""Names among the assets, by path in the package."""


def fetched() -> Mapping[str, bytes]:
    """Return the files of the package by their names among the assets."""
    with tempfile.TemporaryDirectory() as directory:
        packed = subprocess.run(
            ["npm", "pack", "--silent", PACKAGE],
            cwd=directory,
            check=True,
            capture_output=True,
            text=True,
        )
        with tarfile.open(Path(directory) / packed.stdout.strip()) as archive:
            return {name: _read(archive, f"package/{path}") for path, name in FILES.items()}


def _read(archive: tarfile.TarFile, path: str) -> bytes:
    file = archive.extractfile(path)
    if file is None:
        raise SystemExit(f"{PACKAGE} has no file {path}")
    with file:
        return file.read()


def _present(name: str) -> bytes | None:
    return (ASSETS / name).read_bytes() if (ASSETS / name).is_file() else None


def main() -> int:
    """Write the files, or with --check say which differ and return 1."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="only say what differs")
    check = parser.parse_args().check
    stale = {name: text for name, text in fetched().items() if _present(name) != text}
    for name, content in stale.items():
        if not check:
            (ASSETS / name).write_bytes(content)
        print(f"{name}: {'differs from' if check else 'written from'} {PACKAGE}")
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
