"""The machine and jobs that `mp-agent doctor` looks at, and what a check says of them.

The subject of the checks: settings, shared memory, node agents of this machine, Prometheus.
Each part is read once, when a check first needs it; requests are bounded in time and size.
"""

import logging
import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from mp_agent.alerting.site import usable_values
from mp_agent.errors import RingError, SettingError, SourceError
from mp_agent.inputs.addresses import address_of, basic_authorization, is_loopback, shown_address
from mp_agent.inputs.http import Answer, send
from mp_agent.node.endpoint import client_tls
from mp_agent.records.schema import RankIdentity
from mp_agent.ring import locations
from mp_agent.ring.locations import AgentStatus
from mp_agent.ring.reader import RingReader
from mp_agent.ring.run_files import RootNote, read_root_note
from mp_agent.settings import Settings, load_settings


@contextmanager
def captured_warnings(log: logging.Logger) -> Iterator[list[str]]:
    """Collect the messages of level WARNING and above of a logger and its children."""
    messages: list[str] = []

    class Collector(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())

    collector, propagate = Collector(logging.WARNING), log.propagate
    log.addHandler(collector)
    log.propagate = False
    try:
        yield messages
    finally:
        log.propagate = propagate
        log.removeHandler(collector)


class CheckStatus(Enum):
    """Status of a check result."""

    OK = "ok"
    WRONG = "wrong"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class CheckResult:
    """One result of a check."""

    verdict: CheckStatus
    text: str
    remedy: str = ""
    """Empty if nothing is to be done."""


def ok(text: str) -> CheckResult:
    """Return a result for something that is in order."""
    return CheckResult(CheckStatus.OK, text)


def wrong(text: str, remedy: str) -> CheckResult:
    """Return a result for a problem, with its remedy."""
    return CheckResult(CheckStatus.WRONG, text, remedy)


def unknown(text: str, remedy: str = "") -> CheckResult:
    """Return a result for something that cannot be determined."""
    return CheckResult(CheckStatus.UNKNOWN, text, remedy)


_SUPERVISED = "exec-*"
"""Directories in which `mp-agent exec` keeps the runs of its job."""


@dataclass(frozen=True, slots=True)
class Rank:
    """A rank with a ring."""

    identity: RankIdentity
    alive: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundRun:
    """One run's directory in shared memory."""

    directory: Path
    ranks: tuple[Rank, ...]
    refused: tuple[str, ...]
    """Rings that cannot be read, and why."""
    agent_alive: bool
    status: AgentStatus | None
    note: RootNote | None
    """Address of the root agent from the job's store; of the current attempt."""

    @property
    def name(self) -> str:
        """Name of the run; of its directory if no ring can be read."""
        return self.ranks[-1].identity.run if self.ranks else self.directory.name

    @property
    def alive(self) -> bool:
        """Whether one of its ranks is alive."""
        return any(rank.alive for rank in self.ranks)


@dataclass(frozen=True, slots=True)
class Exposition:
    """Responses of a node agent."""

    url: str
    health: Answer
    metrics: Answer
    samples: tuple[Sample, ...]

    def values(self, name: str) -> Iterator[tuple[Mapping[str, str], float]]:
        """Yield labels and value of every series called `name`."""
        for sample in self.samples:
            if sample.name == name:
                yield sample.labels, sample.value


class Machine:
    """The local machine, with the settings of this environment."""

    def __init__(
        self,
        settings: Settings,
        *,
        ignored: tuple[str, ...] = (),
        environ: Mapping[str, str] = os.environ,
        scrape: str = "",
        prometheus: str = "",
        run: str = "",
    ) -> None:
        """run: restricts the checks to one run; scrape, prometheus: base URLs, or empty."""
        self.settings = settings
        self.ignored = ignored
        self.environ = environ
        self.scrape = scrape
        self.prometheus = prometheus
        self.run = run

    @cached_property
    def runs(self) -> tuple[FoundRun, ...]:
        """The runs in shared memory."""
        bases = (self.settings.dir, *sorted(self.settings.dir.glob(_SUPERVISED)))
        found = (_found(path) for base in bases for path in locations.find_runs(base))
        return tuple(run for run in found if self.run in ("", run.name, run.directory.name))

    @cached_property
    def live_runs(self) -> tuple[FoundRun, ...]:
        """The runs with a live rank or node agent."""
        return tuple(run for run in self.runs if run.alive or run.agent_alive)

    @cached_property
    def agents(self) -> tuple[AgentStatus, ...]:
        """Status of the live node agents."""
        statuses = [run.status for run in self.runs if run.agent_alive]
        if self.resident is not None:
            statuses.append(self.resident)
        return tuple({status.pid: status for status in statuses if status}.values())

    @cached_property
    def resident(self) -> AgentStatus | None:
        """Status of the live node agent that watches the whole directory."""
        alive = locations.agent_running(self.settings.dir)
        return locations.read_status(self.settings.dir) if alive else None

    @cached_property
    def expositions(self) -> tuple[Exposition, ...]:
        """Responses of the node agents of this machine, and of the one given by `--scrape`."""
        local = (status.url for status in self.agents if status.port)
        urls = dict.fromkeys(filter(None, (*local, self.scrape)))
        return tuple(_asked(url, self.settings) for url in urls)


def settings_and_ignored() -> tuple[Settings, tuple[str, ...]]:
    """Return the effective settings, and the warnings about ignored values."""
    with captured_warnings(logging.getLogger("mp_agent")) as warnings:
        settings, _ = load_settings()
        # Only the rules know the valid names in `alerts`.
        usable_values(settings)
    return settings, tuple(warnings)


def _found(directory: Path) -> FoundRun:
    ranks, refused = [], []
    for path in locations.find_rings(directory):
        try:
            reader = RingReader.open(path)
        except (RingError, OSError) as error:
            refused.append(str(error))
            continue
        ranks.append(Rank(reader.identity, reader.writer_alive()))
        reader.close()
    ranks.sort(key=lambda rank: rank.identity.created_unix_ns)
    note = read_root_note(directory)
    if note and note.asked_by_unix_ns not in {rank.identity.created_unix_ns for rank in ranks}:
        note = None
    return FoundRun(
        directory=directory,
        ranks=tuple(ranks),
        refused=tuple(refused),
        agent_alive=locations.agent_running(directory),
        status=locations.read_status(directory),
        note=note,
    )


def _asked(url: str, settings: Settings) -> Exposition:
    health = fetch_from_agent(f"{url}/healthz", settings)
    metrics = fetch_from_agent(f"{url}/metrics", settings)
    try:
        families = list(text_string_to_metric_families(metrics.text))
    except Exception:
        # Another program; the check for `mp_agent_build_info` reports it.
        families = []
    return Exposition(
        shown_address(url), health, metrics, tuple(s for f in families for s in f.samples)
    )


TIMEOUT_SECONDS = 5.0
_CONNECT_SECONDS = 3.0
_REFUSED_BY_PROXY = (403, 407, 502, 503, 504)
"""Statuses of a proxy that does not reach, or does not permit, a server."""


def fetch_from_agent(url: str, settings: Settings, query: str = "") -> Answer:
    """GET from a node agent, with the certificates and the password of the settings.

    User and password of the URL, if it has them, come first.
    """
    password = settings.basic_auth_password.get_secret_value()
    try:
        address = address_of(url)
        tls = client_tls(settings) if address.url.startswith("https:") else None
    except (SettingError, SourceError) as error:
        return Answer(0, problem=str(error))
    authorization = address.authorization
    if not authorization and settings.basic_auth_user and password:
        authorization = basic_authorization(settings.basic_auth_user.encode(), password.encode())
    if tls is not None:
        # The certificate is issued for the name by which others reach this machine.
        tls.check_hostname = not is_loopback(address.host)
    # Proxies of the environment are ignored: they may not reach the job's own network.
    return send(address, query=query, seconds=TIMEOUT_SECONDS, authorization=authorization, tls=tls)


def proxy_problem(url: str, proxy: str) -> str:
    """Return why a proxy does not reach a server; "" when that answers, whatever it says."""
    answer = send(address_of(url), seconds=TIMEOUT_SECONDS, proxy=proxy)
    return answer.problem if answer.status in (0, *_REFUSED_BY_PROXY) else ""


def connection_problem(host: str, port: int) -> str:
    """Return why a TCP connection fails; "" when one is established."""
    try:
        socket.create_connection((host, port), timeout=_CONNECT_SECONDS).close()
    except OSError as error:
        return error.strerror or str(error)
    return ""
