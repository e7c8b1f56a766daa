"""One run, judged by its node agent, by Prometheus with the shipped rules, and from its log.

All three bring the same alerts, at the same steps within a scrape; so does a backtest of what
Prometheus has recorded, and one of the trainer's log that was written as the run went.
"""

import csv
import json
import os
import re
import subprocess
import sys
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.logged_job import STEPS
from tests.e2e.observatory import TIME_SCALE
from tests.waiting import wait_until
from tools.jobs import ROOT, torchrun_job
from tools.servers.running import prometheus

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.alone, pytest.mark.long]

RUN = "three-ways"
JOB = Path(__file__).parent / "logged_job.py"
SCRAPE_SECONDS = 1.0
SPARE_SECONDS = 1.0
SEVERITIES = ("critical", "warning", "info")
_EVENT = re.compile(r"condition=(\w+) state=firing severity=(\w+) run=\S+ step=(\d+)")

Alerts = dict[str, tuple[str, float]]
"""Condition → its worst severity, and the Unix time at which it was first reported at it."""


@dataclass(frozen=True)
class Recorded:
    """What is there of the run once it has ended."""

    live: Alerts
    rules: Alerts
    log: Path
    of_log: Alerts
    of_prometheus: Alerts
    delay_seconds: float
    """From a step to the rule that fires, at most: the longest time between two scrapes of the run
    and between two evaluations, which a busy machine stretches."""


def worst(alerts: Iterator[tuple[str, str, float]]) -> Alerts:
    found: Alerts = {}
    for name, severity, at in alerts:
        known = found.get(name)
        if known is None or (SEVERITIES.index(severity), at) < (
            SEVERITIES.index(known[0]),
            known[1],
        ):
            found[name] = (severity, at)
    return found


def times_of(log: Path) -> Callable[[int], float]:
    """Return when the run had made a step, by its own log."""
    with log.open() as file:
        rows = [(int(row["step"]), float(row["timestamp"])) for row in csv.DictReader(file)]
    steps = [step for step, _ in rows]
    return lambda step: rows[max(bisect_right(steps, step) - 1, 0)][1]


def backtest(*arguments: str) -> dict[str, object]:
    done = subprocess.run(
        [sys.executable, "-m", "mp_agent", "backtest", "--json", *arguments],
        env={**os.environ, "MP_AGENT_TIME_SCALE": str(TIME_SCALE)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    (run,) = json.loads(done.stdout)["runs"]
    return dict(run)


@pytest.fixture(scope="module")
def recorded(server, tmp_path_factory) -> Recorded:
    directory = tmp_path_factory.mktemp("three-ways")
    log, rules = directory / "metrics.csv", directory / "rules.yaml"
    scale = ("--time-scale", str(TIME_SCALE), "--output", str(rules))
    subprocess.run([sys.executable, "-m", "mp_agent", "rules", *scale], check=True)
    watched = directory / "watched"
    with (
        prometheus(
            server("prometheus"),
            directory / "prometheus",
            rules=rules,
            alertmanager_url="http://127.0.0.1:9",
        ) as watching,
        torchrun_job(
            (str(JOB), str(log)),
            run=RUN,
            log_file=directory / "job.log",
            environment={
                "MP_AGENT_TIME_SCALE": str(TIME_SCALE),
                "MP_AGENT_LOG_DIR": str(directory / "agent-log"),
                "MP_AGENT_LINGER_SECONDS": "60",
                "MP_AGENT_EXIT_WAIT_SECONDS": "10",
                "PYTHONPATH": os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", ""))),
                "WATCHED": str(watched),
            },
        ) as job,
    ):
        status = wait_until(job.agent, seconds=90, what=f"the node agent\n{job.log_tail()}")
        watching.scrape([status.url.removeprefix("http://")])
        wait_until(
            lambda: len(watching.query(f'mp_agent_rank_up{{run="{RUN}"}}')) == 2,
            seconds=90,
            what="both ranks in Prometheus",
        )
        watched.touch()
        assert job.process.wait(180) == 0, job.log_tail(60)
        ended = wait_until(
            lambda: watching.query(f'timestamp(mp_agent_step{{run="{RUN}"}} == {STEPS})'),
            seconds=60,
            what="the last step in Prometheus",
        )
        end = max(float(one["value"][1]) for one in ended) + 2 * SCRAPE_SECONDS + SPARE_SECONDS
        wait_until(
            lambda: watching.query(f"vector(time()) > {end}"),
            seconds=60,
            what="the last evaluation",
        )
        firing = f'ALERTS{{alertstate="firing",run="{RUN}"}}'
        fired = watching.query(f"min_over_time(timestamp({firing})[10m:500ms])")
        scrapes = watching.query(f'mp_agent_step{{run="{RUN}"}}[10m]')
        evaluations = watching.query(f"{firing}[10m]")
        found = backtest(
            *(watching.url, "--run", RUN, "--start", "10m", "--scrape-interval", "1"),
        )
        (agent_log,) = (directory / "agent-log").glob("*.log")
        events = _EVENT.findall(agent_log.read_text())
    at = times_of(log)
    return Recorded(
        live=worst((name, severity, at(int(step))) for name, severity, step in events),
        rules=worst(
            (one["metric"]["alertname"], one["metric"]["severity"], float(one["value"][1]))
            for one in fired
        ),
        log=log,
        of_log=reported(backtest(str(log)), at),
        of_prometheus=reported(found, at),
        delay_seconds=longest_gap(scrapes) + longest_gap(evaluations) + SPARE_SECONDS,
    )


def longest_gap(series: list[dict[str, Any]]) -> float:
    """Return the longest time between two samples of any of some series, in seconds."""
    times = ([at for at, _ in one["values"]] for one in series)
    gaps = (after - before for own in times for before, after in pairwise(own))
    return max(gaps, default=SCRAPE_SECONDS)


def reported(run: Mapping[str, object], at: Callable[[int], float]) -> Alerts:
    return {
        alert["name"]: (alert["severity"], at(int(alert["value_step"])))
        for alert in run["alerts"]  # type: ignore[attr-defined]
    }


def severities(alerts: Alerts) -> dict[str, str]:
    return {name: severity for name, (severity, _) in alerts.items()}


def test_the_explosion_is_reported_by_the_node_agent(recorded: Recorded) -> None:
    assert recorded.live["MpAgentGradientExplosion"][0] == "critical"
    assert recorded.live.keys() >= {"MpAgentLossSpike", "MpAgentLossDiverging"}


@pytest.mark.parametrize("way", ["rules", "of_log", "of_prometheus"])
def test_each_way_brings_the_same_alerts(recorded: Recorded, way: str) -> None:
    assert severities(getattr(recorded, way)) == severities(recorded.live)


def test_the_log_reports_them_at_the_same_steps_within_a_scrape(recorded: Recorded) -> None:
    for name, (_, live) in recorded.live.items():
        assert recorded.of_log[name][1] == pytest.approx(live, abs=SCRAPE_SECONDS), name


@pytest.mark.parametrize("way", ["rules", "of_prometheus"])
def test_prometheus_reports_them_within_a_scrape_and_an_evaluation(recorded: Recorded, way) -> None:
    for name, (_, live) in recorded.live.items():
        delay = getattr(recorded, way)[name][1] - live
        assert -SCRAPE_SECONDS <= delay <= recorded.delay_seconds, (name, delay)
