"""A headless Chromium for the tests: from PATH, else installed by the machine's own apt."""

import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

_NAMES = ("chromium", "chromium-browser", "google-chrome")
_PACKAGE = "chromium"
_TIMEOUT_SECONDS = 600


@cache
def find_browser() -> Path | None:
    """Return Chromium's binary; None when there is none and this user may not install it.

    Unlike the servers it is not unpacked by itself: it stands on a hundred other packages.
    """
    if found := _on_path():
        return found
    if os.geteuid() == 0 and shutil.which("apt-get"):
        with _one_at_a_time():
            if found := _on_path():
                return found
            try:
                _apt_get("update")
                _apt_get("install", "--yes", "--no-install-recommends", _PACKAGE)
            except (OSError, subprocess.SubprocessError) as error:
                print(f"chromium cannot be installed: {error}", file=sys.stderr)
    return _on_path()


@contextmanager
def _one_at_a_time() -> Iterator[None]:
    """Wait until no other process is here: apt fails where another apt is at work."""
    with (Path(tempfile.gettempdir()) / "mp_agent-apt.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def chromium_arguments() -> list[str]:
    """Return what Chromium has to be started with: as root, it refuses to run with its sandbox."""
    return ["--no-sandbox"] if os.geteuid() == 0 else []


def _on_path() -> Path | None:
    return next((Path(found) for name in _NAMES if (found := shutil.which(name))), None)


def _apt_get(*arguments: str) -> None:
    subprocess.run(
        ["apt-get", "--quiet", f"--option=DPkg::Lock::Timeout={_TIMEOUT_SECONDS}", *arguments],
        check=True,
        capture_output=True,
        timeout=_TIMEOUT_SECONDS,
        env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"},
    )
