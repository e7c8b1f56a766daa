"""From a NaN in a gradient to the log line, `/metrics`, the firing rule and the webhook.

    python -m benchmarks.alert_latency [--trials N] [--scrape-seconds N] [--write]

Each trial is a real training with a probe and a node agent, under a real Prometheus with the
shipped rules and a real Alertmanager with the shipped configuration. The baseline is paired with
it: a check of all gradients in the training loop itself, at the same step.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TypeVar

import torch
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.alert_latency.training import STEP_SECONDS
from benchmarks.machine import describe, markdown
from mp_agent.alerting.alertmanager import render_alertmanager
from tools.jobs import Job, torchrun_job
from tools.servers import binaries
from tools.servers.running import Prometheus, alertmanager, prometheus
from tools.servers.webhook import WebhookReceiver

ALERT = "MpAgentNonFiniteUpdate"
PAGE = Path("docs/alert-path.md")
MARK = "<!-- measured: latency -->"
STAGES = {
    "checked": "a check in the training loop (baseline)",
    "log": "the detector's log line",
    "callback": "`on_condition` in the training process",
    "metrics": "`/metrics`",
    "rule": "the rule fires",
    "webhook": "the webhook is called",
}
_WAIT_SECONDS = 120.0
_POLL_SECONDS = 0.01


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Servers:
    """What watches all trials."""

    prometheus: Prometheus
    webhook: WebhookReceiver


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.alert_latency")
    parser.add_argument("--trials", type=int, default=7)
    parser.add_argument("--scrape-seconds", type=int, default=1)
    parser.add_argument("--write", action="store_true", help=f"also write the table to {PAGE}")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, _servers(Path(name), options.scrape_seconds) as s:
        trials = [_trial(s, number, Path(name)) for number in range(options.trials)]
    machine = describe(torch.device("cpu"))
    text = f"{machine}; {options.trials} trials, steps of {STEP_SECONDS:g} s, "
    text += f"scraped and evaluated every {options.scrape_seconds} s.\n\n"
    text += _table(trials, options.scrape_seconds)
    print(text)
    if options.write:
        head, _, rest = PAGE.read_text(encoding="utf-8").partition(MARK)
        _, _, after = rest.partition("<!-- end -->")
        PAGE.write_text(f"{head}{MARK}\n\n{text}\n\n<!-- end -->{after}", encoding="utf-8")


def _table(trials: Sequence[dict[str, float]], scrape_seconds: int) -> str:
    header = ("from the NaN to", "median", "worst", "steps, median", "scrapes, worst")
    rows = []
    for stage, what in STAGES.items():
        seconds = [trial[stage] for trial in trials]
        rows.append(
            (
                what,
                f"{median(seconds):.3f} s",
                f"{max(seconds):.3f} s",
                f"{median(seconds) / STEP_SECONDS:.1f}",
                f"{max(seconds) / scrape_seconds:.1f}",
            )
        )
    return markdown(header, rows)


@contextmanager
def _servers(directory: Path, scrape_seconds: int) -> Iterator[Servers]:
    found = {name: binaries.find(name) for name in ("prometheus", "alertmanager")}
    server, manager = found["prometheus"], found["alertmanager"]
    if server is None or manager is None:
        raise SystemExit("Prometheus and Alertmanager are needed, and are not to be had here")
    rules = directory / "rules.yaml"
    command = [sys.executable, "-m", "mp_agent", "rules", "--output", str(rules)]
    subprocess.run(command, check=True)
    with (
        WebhookReceiver() as webhook,
        alertmanager(
            manager, directory / "am", render_alertmanager("Measured.", webhook_url=webhook.url)
        ) as url,
        prometheus(
            server,
            directory / "prometheus",
            rules=rules,
            alertmanager_url=url,
            interval_seconds=scrape_seconds,
        ) as running,
    ):
        yield Servers(running, webhook)


def _trial(servers: Servers, number: int, directory: Path) -> dict[str, float]:
    """Return the seconds from the NaN to each stage."""
    run, place = f"latency-{number}", directory / f"trial-{number}"
    place.mkdir()
    script = str(Path(__file__).parent / "training.py")
    steps = random.Random(number).randrange(40, 100)
    with torchrun_job(
        [script, str(place), str(steps)],
        run=run,
        log_file=place / "job.log",
        ranks=1,
        environment={"MP_AGENT_LINGER_SECONDS": "1", "MP_AGENT_EXIT_WAIT_SECONDS": "0"},
    ) as job:
        address = _until(lambda: _address(job), "the node agent")
        servers.prometheus.scrape([address])
        query = f'mp_agent_steps_total{{run="{run}"}} > 5'
        _until(lambda: servers.prometheus.query(query), "steps in Prometheus")
        (place / "go").touch()
        seen = _watch(servers, run, address, place)
        (place / "stop").touch()
        job.process.wait(_WAIT_SECONDS)
    planted = seen.pop("planted")
    print(f"{run}: planted, then {seen}", file=sys.stderr)
    return {stage: seconds - planted for stage, seconds in seen.items()}


def _address(job: Job) -> str:
    status = job.agent()
    return "" if status is None else status.url.removeprefix("http://")


def _watch(servers: Servers, run: str, address: str, place: Path) -> dict[str, float]:
    """Return when each stage was seen, in Unix seconds."""
    log = place / "agent-log"
    firing = f'ALERTS{{alertname="{ALERT}",alertstate="firing",run="{run}"}}'
    stages: dict[str, Callable[[], object]] = {
        "log": lambda: any(ALERT.encode() in p.read_bytes() for p in log.rglob("*") if p.is_file()),
        "metrics": lambda: _exposes(address, run),
        "rule": lambda: servers.prometheus.query(firing),
        "webhook": lambda: any(a.name == ALERT for a in servers.webhook.firing(run=run)),
    }
    seen: dict[str, float] = {}
    deadline = time.monotonic() + _WAIT_SECONDS
    while len(seen) < len(stages):
        for stage in [stage for stage in stages if stage not in seen]:
            if stages[stage]():
                seen[stage] = time.time()
        if time.monotonic() > deadline:
            raise SystemExit(f"{run}: only {sorted(seen)} was seen within {_WAIT_SECONDS:g} s")
        time.sleep(_POLL_SECONDS)
    facts = json.loads((place / "planted.json").read_text())
    callback = json.loads((place / "callback.json").read_text())
    return {
        "planted": facts["planted_unix_seconds"],
        "checked": facts["checked_unix_seconds"],
        "callback": callback["callback_unix_seconds"],
        **seen,
    }


def _exposes(address: str, run: str) -> bool:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    return any(
        sample.labels.get("run") == run and sample.labels.get("condition") == ALERT and sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == "mp_agent_condition_active"
    )


def _until(predicate: Callable[[], T], what: str) -> T:
    deadline = time.monotonic() + _WAIT_SECONDS
    while not (value := predicate()):
        if time.monotonic() > deadline:
            raise SystemExit(f"waited {_WAIT_SECONDS:g} s for {what}")
        time.sleep(_POLL_SECONDS)
    return value


if __name__ == "__main__":
    main()
