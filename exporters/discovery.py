"""The node agents of a run as Prometheus discovers them: http_sd answers and file_sd files.

All labels are `__meta_` ones, which relabelling may use and Prometheus then drops: the agent never
sets a target's labels, and the metrics carry `run` themselves.
"""

import hashlib
import json
import os
import re
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

CONTENT_TYPE = "application/json"
STALE_SECONDS = 600.0
"""A file that was not refreshed for so long is of a run that died with its root."""

_FILE_MODE = 0o644
_PREFIX = "mp_agent-"
_SUFFIX = ".json"
_UNSAFE = re.compile(r"[^A-Za-z0-9._-]+")
_LEGIBLE_CHARACTERS = 60
_HASH_CHARACTERS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """One node agent, and which node of which run it serves."""

    url: str
    """Base URL."""
    run: str
    attempt: int
    node_rank: int
    host: str


def render_targets(targets: Iterable[Target]) -> bytes:
    """Return the JSON that http_sd and file_sd have in common, one group per target."""
    groups = [{"targets": [urlsplit(t.url).netloc], "labels": _labels(t)} for t in targets]
    return json.dumps(groups, indent=1).encode() + b"\n"


def _labels(target: Target) -> dict[str, str]:
    labels = {
        "__meta_mp_agent_run": target.run,
        "__meta_mp_agent_attempt": str(target.attempt),
        "__meta_mp_agent_node_rank": str(target.node_rank),
        "__meta_mp_agent_host": target.host,
    }
    if urlsplit(target.url).scheme == "https":
        labels["__scheme__"] = "https"
    return labels


class TargetsFile:
    """The file_sd file of one run, in a directory that other roots may write into as well."""

    def __init__(self, directory: Path, run: str, root: str) -> None:
        """Name the file after run and root agent: two roots of a run never share one."""
        self.path = directory / f"{_PREFIX}{_slug(run, root)}{_SUFFIX}"
        self._written = b""

    def write(self, content: bytes) -> None:
        """Put `content` in place as a whole, readable by everybody; refresh it if it is there.

        Raises OSError when it cannot be written; nothing half-written is left.
        """
        if content == self._written and self.path.exists():
            os.utime(self.path)
            return
        fd, hidden = tempfile.mkstemp(prefix=".", suffix=".partial", dir=self.path.parent)
        try:
            with os.fdopen(fd, "wb") as file:
                os.fchmod(fd, _FILE_MODE)
                file.write(content)
            os.replace(hidden, self.path)
        except BaseException:
            Path(hidden).unlink(missing_ok=True)
            raise
        self._written = content

    def remove_stale(self) -> list[Path]:
        """Delete the files of roots that went without deleting them; return which.

        Their age is taken from this file's own time stamp, so clocks of nodes do not matter. What
        may not be deleted, in a directory of several users, stays.
        """
        now = self.path.stat().st_mtime
        removed = []
        for other in self.path.parent.glob(f"{_PREFIX}*{_SUFFIX}"):
            try:
                if now - other.stat().st_mtime > STALE_SECONDS:
                    other.unlink()
                    removed.append(other)
            except (FileNotFoundError, PermissionError):
                continue
        return removed

    def remove(self) -> None:
        """Delete the file. Raises OSError when that is not possible."""
        self.path.unlink(missing_ok=True)


def _slug(run: str, root: str) -> str:
    legible = _UNSAFE.sub("-", f"{run}-{root}")[:_LEGIBLE_CHARACTERS].strip(".-")
    digest = hashlib.sha256(f"{run}\0{root}".encode(errors="surrogatepass")).hexdigest()
    return f"{legible}-{digest[:_HASH_CHARACTERS]}"
