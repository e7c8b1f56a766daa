"""Service discovery of node agents: `/sd` for http_sd, `sd_dir` for file_sd.

All labels are `__meta_` ones, which relabelling may use and Prometheus then drops: the agent never
sets a target's labels, and the metrics carry `run` themselves.
"""

import asyncio
import hashlib
import json
import logging
import os
import re
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from aiohttp import web

from mp_agent.inputs.addresses import base_url
from mp_agent.node.endpoint import Endpoint
from mp_agent.node.transport.root_link import RootLink
from mp_agent.settings import Settings

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


log = logging.getLogger("mp_agent.node")

WRITE_INTERVAL_SECONDS = 15.0
SD_PATH = "/sd"
_DRAIN_POLL_SECONDS = 0.02
_FEW_TARGETS = 64
_TARGETS_PER_SECOND = 500.0
"""With many targets the file is updated less often: a thousand take tens of milliseconds."""


class ServiceDiscovery:
    """The root of a run lists all its nodes; other agents list themselves."""

    def __init__(
        self,
        settings: Settings,
        links: Callable[[], Iterable[RootLink]],
        endpoint: Callable[[], Endpoint | None],
    ) -> None:
        """links: those of the watched runs; endpoint: where this agent listens."""
        self._settings = settings
        self._links = links
        self._endpoint = endpoint
        self._files: dict[Path, _Entry] = {}
        """Entries by run directory."""
        self._file_worker = _FileWorker()
        self._rests_until_seconds = 0.0

    def routes(self) -> list[web.RouteDef]:
        """Return the routes for the HTTP server."""
        return [web.get(SD_PATH, self._answer)]

    def start(self) -> None:
        """Do nothing: there is no run yet."""

    def tick(self, now_seconds: float) -> None:
        """Keep the files in `sd_dir` up to date."""
        if self._settings.sd_dir is None or now_seconds < self._rests_until_seconds:
            return
        links = {link.run.run_dir: link for link in self._links() if link.collects}
        for run_dir in self._files.keys() - links.keys():
            self._remove(run_dir)
        for run_dir, link in links.items():
            targets = self._targets(link, socket.gethostname())
            if len(targets) > _FEW_TARGETS:
                self._rests_until_seconds = now_seconds + len(targets) / _TARGETS_PER_SECOND
            content = render_targets(targets)
            entry = self._files.get(run_dir)
            if entry is None or content != entry.content or now_seconds >= entry.due_seconds:
                self._write(link, content, now_seconds + WRITE_INTERVAL_SECONDS)

    async def stop(self, deadline_seconds: float) -> None:
        """Remove the files: this agent no longer answers."""
        for run_dir in list(self._files):
            self._remove(run_dir)
        while self._file_worker.busy and time.monotonic() < deadline_seconds:
            await asyncio.sleep(_DRAIN_POLL_SECONDS)

    async def _answer(self, request: web.Request) -> web.Response:
        # The client has reached this agent under that name.
        host = request.url.host or socket.gethostname()
        targets = [target for link in self._links() for target in self._targets(link, host)]
        return web.Response(body=render_targets(targets), content_type=CONTENT_TYPE)

    def _targets(self, link: RootLink, own_host: str) -> list[Target]:
        """Return the endpoints of a run; own_host: fallback for this agent's address."""
        run, endpoint = link.run, self._endpoint()
        if not run.seen or endpoint is None:
            return []
        own_url = link.own_url() or base_url(own_host, endpoint.port, tls=endpoint.tls)
        own = _target(link, own_url, run.identity.node_rank, run.identity.host)
        if not link.collects:
            return [own]
        others = [
            _target(link, node.url, node.node_rank, node.host)
            for node in run.nodes
            if node.url and node.node_rank != own.node_rank
            if node.active or node.silent_seconds <= self._settings.linger_seconds
        ]
        return sorted([own, *others], key=lambda target: target.node_rank)

    def _write(self, link: RootLink, content: bytes, due_seconds: float) -> None:
        run_dir, endpoint = link.run.run_dir, self._endpoint()
        if endpoint is None or self._settings.sd_dir is None:
            return
        entry = self._files.get(run_dir)
        root = f"{socket.gethostname()}-{endpoint.port}"
        file = entry.file if entry else TargetsFile(self._settings.sd_dir, link.run.name, root)
        self._files[run_dir] = _Entry(file, content, due_seconds)
        self._file_worker.do(file.path, lambda: _refresh(file, content))

    def _remove(self, run_dir: Path) -> None:
        file = self._files.pop(run_dir).file
        self._file_worker.do(file.path, file.remove)


@dataclass(frozen=True, slots=True)
class _Entry:
    file: TargetsFile
    content: bytes
    due_seconds: float


class _FileWorker:
    """Writes files in a separate thread: a hanging network file system blocks nothing else.

    Of several pending jobs for one file only the last one runs.
    """

    def __init__(self) -> None:
        self._jobs: dict[Path, Callable[[], None]] = {}
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._working = False
        self._failures: set[str] = set()

    @property
    def busy(self) -> bool:
        """Whether a job is pending or running."""
        with self._changed:
            return self._working or bool(self._jobs)

    def do(self, path: Path, job: Callable[[], None]) -> None:
        """Queue a job."""
        with self._changed:
            self._jobs[path] = job
            self._changed.notify()
        if self._thread is None:
            # A daemon, so that it does not delay the end of the agent.
            self._thread = threading.Thread(target=self._work, name="sd_dir", daemon=True)
            self._thread.start()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._working = False
                self._changed.wait_for(lambda: self._jobs)
                path, job = self._jobs.popitem()
                self._working = True
            try:
                job()
            except OSError as error:
                self._log_once(f"targets file {path}: {error.strerror}")

    def _log_once(self, text: str) -> None:
        if text not in self._failures:
            self._failures.add(text)
            log.warning(text)


def _refresh(file: TargetsFile, content: bytes) -> None:
    file.write(content)
    for stale in file.remove_stale():
        log.info("removed %s, which is no longer refreshed", stale)


def _target(link: RootLink, url: str, node_rank: int, host: str) -> Target:
    run = link.run
    return Target(
        url=url, run=run.name, attempt=run.identity.attempt, node_rank=node_rank, host=host
    )
