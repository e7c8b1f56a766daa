"""Server binaries for the demo and the tests: from PATH, else unpacked without root into .cache/.

A binary on PATH is used if it reports at least the version that the tests were written against.
What PATH lacks is fetched with `apt-get download` from the Debian mirror that this machine already
uses (suite trixie, checked against its keyring), with apt's lists and caches kept in .cache/, so
that the machine's own apt state is left alone. `python -m tools.servers` prints what it found.
"""

import fcntl
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from tools.servers.relocation import relocate

SUITE = "trixie"
CACHE = Path(__file__).resolve().parents[2] / ".cache" / "servers"
_KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
_TIMEOUT_SECONDS = 300

_PACKAGES = {
    "prometheus": "prometheus",
    "promtool": "promtool",
    "alertmanager": "prometheus-alertmanager",
    "amtool": "prometheus-alertmanager",
    "victoria-metrics": "victoria-metrics",
    "vmalert": "victoria-metrics",
    "vmagent": "victoria-metrics",
}
"""Binary name to the Debian package that holds it."""

_OLDEST = {
    "prometheus": (2, 53),
    "promtool": (2, 53),
    "alertmanager": (0, 28),
    "amtool": (0, 28),
    "victoria-metrics": (1, 112),
    "vmalert": (1, 112),
    "vmagent": (1, 112),
}
"""Oldest major and minor version that will do: the one that the suite has."""

_VERSION = re.compile(r"(?:version |-v)(\d+)\.(\d+)\.\d+")

_ALIASES = {"alertmanager": ("alertmanager", "prometheus-alertmanager")}
"""Names under which a binary is installed, where Debian's differs from upstream's."""

_APT_CONFIGURATION = """\
Dir::Etc::sourcelist "{root}/sources.list";
Dir::Etc::sourceparts "-";
Dir::State "{root}/state";
Dir::State::status "{root}/status";
Dir::Cache "{root}/cache";
APT::Sandbox::User "";
APT::Update::Error-Mode "any";
Acquire::Retries "1";
Acquire::http::Timeout "20";
Acquire::https::Timeout "20";
Acquire::Languages "none";
#clear APT::Update::Pre-Invoke;
#clear APT::Update::Post-Invoke;
#clear APT::Update::Post-Invoke-Success;
#clear Acquire::IndexTargets::deb::Contents-deb;
#clear Acquire::IndexTargets::deb::DEP-11;
#clear Acquire::IndexTargets::deb::DEP-11-icons;
#clear Acquire::IndexTargets::deb::DEP-11-icons-small;
#clear Acquire::IndexTargets::deb::DEP-11-icons-large;
#clear Acquire::IndexTargets::deb::DEP-11-icons-hidpi;
#clear Acquire::IndexTargets::deb::DEP-11-icons-large-hidpi;
"""


@cache
def find(name: str) -> Path | None:
    """Return the binary called `name`, fetched if need be; None when it cannot be had here."""
    on_path = _on_path(name)
    if on_path is not None and _new_enough(name, on_path):
        return on_path
    if found_here := _unpacked(name):
        return found_here
    try:
        _fetch(_PACKAGES[name])
    except (OSError, subprocess.SubprocessError) as error:
        wanted = ".".join(map(str, _OLDEST[name]))
        lacking = f"{on_path} is older than {wanted}" if on_path is not None else "not on PATH"
        print(f"{name}: {lacking}, and apt cannot provide it: {_reason(error)}", file=sys.stderr)
    return _unpacked(name)


def _on_path(name: str) -> Path | None:
    for alias in _ALIASES.get(name, (name,)):
        if found := shutil.which(alias):
            return Path(found)
    return None


def _new_enough(name: str, binary: Path) -> bool:
    """Return whether `binary` reports a version that will do; one that reports none will not."""
    try:
        ran = subprocess.run(
            [binary, "--version"], capture_output=True, text=True, timeout=_TIMEOUT_SECONDS
        )
    except (OSError, subprocess.SubprocessError):
        return False
    found = _VERSION.search(ran.stdout + ran.stderr)
    return found is not None and (int(found[1]), int(found[2])) >= _OLDEST[name]


def _unpacked(name: str) -> Path | None:
    binaries = CACHE / _PACKAGES[name] / "usr" / "bin"
    for alias in _ALIASES.get(name, (name,)):
        if os.access(binaries / alias, os.X_OK):
            return binaries / alias
    return None


def _fetch(package: str) -> None:
    """Unpack `package` under CACHE; the first mirror that delivers it wins."""
    CACHE.mkdir(parents=True, exist_ok=True)
    with _locked(CACHE / ".lock"):
        if (CACHE / package).exists():
            return
        mirrors = _mirrors()
        if not mirrors:
            raise OSError("apt knows no package mirror on this machine")
        for number, mirror in enumerate(mirrors):
            try:
                return _fetch_from(mirror, package)
            except subprocess.SubprocessError:
                if number == len(mirrors) - 1:
                    raise


def _mirrors() -> list[str]:
    """Return the mirrors of the machine's apt sources that may carry the suite, in their order."""
    listing = subprocess.run(
        ["apt-get", "indextargets", "--format", "$(REPO_URI) $(RELEASE)", "Created-By: Packages"],
        check=True,
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_SECONDS,
    )
    rows = (line.split() for line in listing.stdout.splitlines())
    main = [row[0] for row in rows if len(row) == 2 and not row[1].endswith("-security")]
    return list(dict.fromkeys(main))


def _fetch_from(mirror: str, package: str) -> None:
    apt = CACHE / ".apt"
    _prepare_apt(apt, mirror)
    _run(["apt-get", "-q", "-c", f"{apt}/apt.conf", "update"], apt)
    _run(["apt-get", "-q", "-c", f"{apt}/apt.conf", "download", package], apt / "debs")
    (archive,) = (apt / "debs").glob(f"{package}_*.deb")
    unpacking = apt / "unpacking"
    shutil.rmtree(unpacking, ignore_errors=True)
    _run(["dpkg", "-x", str(archive), str(unpacking)], apt)
    archive.unlink()
    relocate(unpacking)
    unpacking.rename(CACHE / package)


def _prepare_apt(apt: Path, mirror: str) -> None:
    for directory in ("state/lists/partial", "cache/archives/partial", "debs"):
        (apt / directory).mkdir(parents=True, exist_ok=True)
    (apt / "status").touch()
    keyring = f"[signed-by={_KEYRING}] " if _KEYRING.exists() else ""
    (apt / "sources.list").write_text(f"deb {keyring}{mirror} {SUITE} main\n")
    (apt / "apt.conf").write_text(_APT_CONFIGURATION.format(root=apt))


def _run(command: list[str], directory: Path) -> None:
    subprocess.run(
        command,
        cwd=directory,
        check=True,
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_SECONDS,
    )


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a lock that other processes fetching at the same time wait for."""
    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _reason(error: Exception) -> str:
    if isinstance(error, subprocess.CalledProcessError):
        lines = error.stderr.strip().splitlines()
        return lines[-1] if lines else f"{error.cmd[0]} ended with {error.returncode}"
    return str(error)


def main() -> None:
    """Print where each binary is, or that it is missing."""
    for name in _PACKAGES:
        print(f"{name:<18}{find(name) or 'missing'}")
