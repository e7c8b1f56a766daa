"""Real Prometheus and Alertmanager on free ports of this machine, for as long as a `with` lasts.

Both keep everything in the directory that they are given, listen on the loopback address alone,
and are gone when the block is left.
"""

import json
import os
import shutil
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tools.servers.relocation import start_directory

_HOST = "127.0.0.1"
_READY_SECONDS = 30.0
_STOP_SECONDS = 10.0
_ANSWER_SECONDS = 60.0
_PORT_ATTEMPTS = 3


class ServerError(RuntimeError):
    """A server did not come up; the message ends with the last lines that it logged."""


@dataclass(frozen=True, slots=True)
class Prometheus:
    """A running Prometheus, and what one asks of it."""

    url: str
    targets_file: Path
    log_file: Path

    def scrape(self, addresses: Sequence[str]) -> None:
        """Scrape `addresses` (host:port) from now on, in place of earlier ones."""
        text = json.dumps([{"targets": list(addresses)}])
        partial = self.targets_file.with_suffix(".partial")
        partial.write_text(text)
        os.replace(partial, self.targets_file)

    def query(self, expression: str) -> list[dict[str, Any]]:
        """Return the instant vector of a PromQL expression: metric labels and [time, value]."""
        parameters = urllib.parse.urlencode({"query": expression})
        answer = read_json(f"{self.url}/api/v1/query?{parameters}")
        return list(answer["data"]["result"])

    def alerts(self) -> list[dict[str, Any]]:
        """Return the pending and firing alerts, as Prometheus' own API shows them."""
        return list(read_json(f"{self.url}/api/v1/alerts")["data"]["alerts"])

    def healthy_targets(self) -> int:
        """Return how many targets answered their last scrape."""
        targets = read_json(f"{self.url}/api/v1/targets?state=active")["data"]["activeTargets"]
        return sum(target["health"] == "up" for target in targets)


@contextmanager
def prometheus(
    binary: Path,
    directory: Path,
    *,
    rules: Path,
    alertmanager_url: str,
    interval_seconds: int = 1,
    replica: str = "",
    federated: Sequence[str] = (),
) -> Iterator[Prometheus]:
    """Run Prometheus with the rule file `rules`; it scrapes and evaluates every interval.

    replica: external label of one of several alike, which alerts lose on their way out.
    federated: URLs of others of which it takes all series of mp_agent, with their labels.
    """
    targets_file = directory / "targets.json"
    interval = f"{interval_seconds}s"
    configuration = {
        "global": {
            "scrape_interval": interval,
            "evaluation_interval": interval,
            "external_labels": {"replica": replica} if replica else {},
        },
        "rule_files": [str(rules)],
        "alerting": {
            "alert_relabel_configs": [{"action": "labeldrop", "regex": "replica"}],
            "alertmanagers": [
                {"static_configs": [{"targets": [alertmanager_url.removeprefix("http://")]}]}
            ],
        },
        "scrape_configs": [
            {"job_name": "mp-agent", "file_sd_configs": [{"files": [str(targets_file)]}]},
            *([_federation(federated)] if federated else []),
        ],
    }
    directory.mkdir(parents=True, exist_ok=True)
    targets_file.write_text("[]")
    configuration_file = directory / "prometheus.yaml"
    configuration_file.write_text(yaml.safe_dump(configuration))
    arguments = [
        f"--config.file={configuration_file}",
        f"--storage.tsdb.path={directory / 'data'}",
        f"--rules.alert.resend-delay={interval}",
    ]
    with serving(binary, arguments, directory / "prometheus.log") as url:
        yield Prometheus(url, targets_file, directory / "prometheus.log")


def _federation(urls: Sequence[str]) -> dict[str, Any]:
    return {
        "job_name": "federated",
        "honor_labels": True,
        "metrics_path": "/federate",
        "params": {"match[]": ['{job="mp-agent"}']},
        "static_configs": [{"targets": [url.removeprefix("http://") for url in urls]}],
    }


@contextmanager
def alertmanager(binary: Path, directory: Path, configuration: str) -> Iterator[str]:
    """Run Alertmanager with the text of its configuration and yield its URL."""
    directory.mkdir(parents=True, exist_ok=True)
    configuration_file = directory / "alertmanager.yaml"
    configuration_file.write_text(configuration)
    arguments = [
        f"--config.file={configuration_file}",
        f"--storage.path={directory / 'data'}",
        "--cluster.listen-address=",
    ]
    with serving(binary, arguments, directory / "alertmanager.log") as url:
        yield url


def read_json(url: str) -> Any:
    """Return the parsed JSON behind `url`; OSError when it does not answer with it."""
    with urllib.request.urlopen(url, timeout=_ANSWER_SECONDS) as response:
        return json.load(response)


@dataclass(frozen=True, slots=True)
class Listening:
    """How a server is given its address, and the path that answers once it is ready."""

    option: str = "--web.listen-address"
    ready_path: str = "/-/ready"


PROMETHEUS_STYLE = Listening()
VICTORIA_STYLE = Listening("-httpListenAddr", "/health")


@contextmanager
def serving(
    binary: Path,
    arguments: Sequence[str],
    log_file: Path,
    listening: Listening = PROMETHEUS_STYLE,
) -> Iterator[str]:
    """Run a server on a free port, wait until it is ready, yield its URL, end it.

    What it keeps in `data` apart from its log is removed at the end.
    """
    process, url = _start(binary, arguments, log_file, listening)
    try:
        yield url
    finally:
        stop(process)
        shutil.rmtree(log_file.parent / "data", ignore_errors=True)


def _start(
    binary: Path, arguments: Sequence[str], log_file: Path, listening: Listening
) -> tuple[subprocess.Popen[bytes], str]:
    """Start a server; a port that was taken in the meantime is exchanged for another."""
    for _ in range(_PORT_ATTEMPTS):
        address = f"{_HOST}:{free_port()}"
        with log_file.open("wb") as log:
            process = subprocess.Popen(
                [str(binary), *arguments, f"{listening.option}={address}"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=start_directory(binary) or log_file.parent,
            )
        if _ready(process, f"http://{address}{listening.ready_path}"):
            return process, f"http://{address}"
        stop(process)
    tail = "\n".join(log_file.read_text(errors="replace").splitlines()[-5:])
    raise ServerError(f"{binary.name} did not become ready:\n{tail}")


def _ready(process: subprocess.Popen[bytes], url: str) -> bool:
    deadline = time.monotonic() + _READY_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(url, timeout=2):
                return True
        except (OSError, urllib.error.URLError):
            time.sleep(0.05)
    return False


def free_port() -> int:
    """Return a port of the loopback address that is free at this moment."""
    with socket.socket() as probe:
        probe.bind((_HOST, 0))
        return int(probe.getsockname()[1])


def stop(process: subprocess.Popen[Any], seconds: float = _STOP_SECONDS) -> None:
    """End a process by SIGTERM, and by SIGKILL when it has not ended after `seconds`."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
