"""Jobs under the eyes of real servers: Prometheus, the shipped rules, Alertmanager, a webhook."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from mp_agent.alerting.alertmanager import render_alertmanager
from mp_agent.ring import locations
from mp_agent.ring.reader import RingReader
from tests.e2e.scenarios import Scenario
from tests.waiting import BUSY_FACTOR, wait_until
from tools.jobs import Job, torchrun_job
from tools.servers.running import Prometheus, alertmanager, free_port, prometheus
from tools.servers.webhook import Notification, WebhookReceiver

TIME_SCALE = 1 / 60
"""Minutes become seconds: `mp-agent rules --time-scale`."""
JOB = Path(__file__).parent / "job.py"
_JOBS_AT_A_TIME = 3
_JOB_SECONDS = 240.0
_ALERT_SECONDS = 30.0
_SETTLING_SECONDS = 8.0
"""Longer than every wait of the scaled rules that could still bring an alert after the end."""
_SEVERITIES = ("info", "warning", "critical")


@dataclass(frozen=True, slots=True)
class Observation:
    """What one job brought."""

    exit_code: int
    arrived: tuple[Notification, ...]
    """First firing notification of each alert, in order."""
    fired: Mapping[str, str]
    """Every alert that Prometheus saw firing, muted ones included, with its worst severity."""
    log: str
    started_unix_seconds: float
    ended_unix_seconds: float
    """When its node agents were still scraped."""


class Observatory:
    """Runs jobs, several at a time if asked from several threads, and says what they brought."""

    def __init__(
        self,
        running: Prometheus,
        webhook: WebhookReceiver,
        directory: Path,
        pool: ThreadPoolExecutor,
    ) -> None:
        self.prometheus = running
        self._webhook = webhook
        self._directory = directory
        self._pool = pool
        self._observations: dict[str, Future[Observation]] = {}
        self._addresses: dict[Path, str] = {}
        self._lock = threading.Lock()

    def begin(self, scenario: Scenario) -> "Future[Observation]":
        """Return what a scenario will have brought; its job runs once, however often asked for."""
        if scenario.name not in self._observations:
            self._observations[scenario.name] = self._pool.submit(self.observe, scenario)
        return self._observations[scenario.name]

    def observe(self, scenario: Scenario) -> Observation:
        """Run a scenario's job to its end, and wait for its alerts and a while longer."""
        run = scenario.name
        started = time.time()
        with ExitStack() as stack:
            jobs = [stack.enter_context(job) for job in self._jobs(scenario)]
            for job in jobs:
                self._scrape(job)
            self._let_train(scenario, ranks=2 * len(jobs))
            if scenario.killed:
                kill_ranks(jobs[0])
            exit_code = max(job.process.wait(_JOB_SECONDS) for job in jobs)
            self._await(run, scenario)
            return Observation(
                exit_code=exit_code,
                arrived=self._webhook.firing(run=run),
                fired=self._fired(run),
                log=jobs[0].log_tail(60),
                started_unix_seconds=started,
                ended_unix_seconds=time.time(),
            )

    def _jobs(self, scenario: Scenario) -> Iterator[AbstractContextManager[Job]]:
        """Yield torchrun of each node of a scenario's job."""
        arguments = (str(JOB), *(scenario.arguments or (scenario.name,)))
        environment = {
            "MP_AGENT_LINGER_SECONDS": "60",
            "MP_AGENT_EXIT_WAIT_SECONDS": "10",
            "MP_AGENT_MEASURE_STEP_PARTS": "1",
            "WATCHED": str(self._watched(scenario)),
        }
        port = free_port()
        for node in range(scenario.nodes):
            several: dict[str, Any] = {
                "environment": {**environment, "MP_AGENT_ADVERTISE": "127.0.0.1"},
                "rendezvous": (
                    *("--nnodes", str(scenario.nodes), "--node-rank", str(node)),
                    *("--master-addr", "127.0.0.1", "--master-port", str(port)),
                ),
            }
            yield torchrun_job(
                arguments,
                run=scenario.name,
                log_file=self._directory / f"{scenario.name}-{node}.log",
                **(several if scenario.nodes > 1 else {"environment": environment}),
            )

    def _scrape(self, job: Job) -> None:
        status = wait_until(
            job.agent, seconds=90, what=f"the node agent of {job.run}\n{job.log_tail()}"
        )
        with self._lock:
            self._addresses[job.directory] = status.url.removeprefix("http://")
            self.prometheus.scrape(sorted(self._addresses.values()))

    def _let_train(self, scenario: Scenario, *, ranks: int) -> None:
        """Let a job begin once Prometheus has its ranks."""
        wait_until(
            lambda: (
                len(self.prometheus.query(f'mp_agent_rank_up{{run="{scenario.name}"}}')) == ranks
            ),
            seconds=90,
            what=f"{ranks} ranks of {scenario.name} in Prometheus",
        )
        self._watched(scenario).touch()

    def _watched(self, scenario: Scenario) -> Path:
        return self._directory / f"{scenario.name}.watched"

    def _await(self, run: str, scenario: Scenario) -> None:
        deadline = time.monotonic() + _ALERT_SECONDS * BUSY_FACTOR
        while time.monotonic() < deadline:
            names = {alert.name for alert in self._webhook.firing(run=run)}
            if names >= set(scenario.alerts):
                break
            time.sleep(0.2)
        # Nothing shows that no further alert will come; only time does.
        time.sleep(_SETTLING_SECONDS)

    def _fired(self, run: str) -> dict[str, str]:
        alerts = self.prometheus.query(
            f'max_over_time(ALERTS{{alertstate="firing",run="{run}"}}[10m])'
        )
        worst: dict[str, str] = {}
        for alert in alerts:
            name, severity = alert["metric"]["alertname"], alert["metric"]["severity"]
            worst[name] = max(worst.get(name, severity), severity, key=_SEVERITIES.index)
        return worst


def kill_ranks(job: Job, *, further_steps: int = 200) -> None:
    """Send SIGKILL to all ranks of a job, once it has made some steps from now on."""
    readers = wait_until(lambda: _readers(job, 2), seconds=60, what="the rings of both ranks")
    try:
        last = readers[0].state.committed_sequence + further_steps
        for reader in readers:
            wait_until(partial(_has_step, reader, last), seconds=60, what=f"step {last}")
        for reader in readers:
            os.kill(reader.identity.pid, signal.SIGKILL)
    finally:
        for reader in readers:
            reader.close()


def _has_step(reader: RingReader, step: int) -> bool:
    return reader.state.committed_sequence >= step


def _readers(job: Job, ranks: int) -> list[RingReader]:
    paths = locations.find_rings(job.run_dir)
    return [RingReader.open(path) for path in paths] if len(paths) == ranks else []


@contextmanager
def observatory(find: Callable[[str], Path], directory: Path) -> Iterator[Observatory]:
    """Start the servers with the rules that `mp-agent rules` writes; stop them at the end."""
    binaries = find("alertmanager"), find("prometheus")
    rules = directory / "rules.yaml"
    subprocess.run(
        [
            *(sys.executable, "-m", "mp_agent", "rules"),
            *("--time-scale", str(TIME_SCALE), "--output", str(rules)),
        ],
        check=True,
    )
    with WebhookReceiver() as webhook:
        configuration = render_alertmanager(
            "Written by a test.", webhook_url=webhook.url, time_scale=TIME_SCALE
        )
        with (
            alertmanager(binaries[0], directory / "alertmanager", configuration) as url,
            prometheus(
                binaries[1], directory / "prometheus", rules=rules, alertmanager_url=url
            ) as running,
            ThreadPoolExecutor(_JOBS_AT_A_TIME) as pool,
        ):
            yield Observatory(running, webhook, directory, pool)
