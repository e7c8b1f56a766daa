"""Debian's Alertmanager looks for its templates in /usr/share; unpacked elsewhere, it needs help.

Without root nothing can be put there, so the path inside the unpacked binary is replaced by one of
equal length that leads to wherever the server is started: its own working directory.
"""

from pathlib import Path

MARK = ".relocated"
_ASSETS = Path("usr/share/prometheus/alertmanager")
_WORKING_DIRECTORY = b"/proc/self/cwd"


def relocate(root: Path) -> None:
    """Make the binaries of a package unpacked at `root` find their assets by `start_directory`."""
    if not (root / _ASSETS).is_dir():
        return
    written = f"/{_ASSETS}".encode()
    replacement = _WORKING_DIRECTORY.ljust(len(written), b"/")
    for binary in (root / "usr" / "bin").iterdir():
        content = binary.read_bytes()
        if written in content:
            binary.write_bytes(content.replace(written, replacement))
    (root / MARK).touch()


def start_directory(binary: Path) -> Path | None:
    """Return the directory in which a relocated binary must be started; None for any other."""
    root = binary.parent.parent.parent
    return root / _ASSETS if (root / MARK).exists() else None
