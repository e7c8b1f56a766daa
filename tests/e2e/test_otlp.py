"""The same jobs scraped by Prometheus and pushed to VictoriaMetrics: same series, same alerts."""

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.observatory import JOB
from tests.e2e.scenarios import BY_NAME, Scenario
from tests.waiting import BUSY_FACTOR, wait_until
from tools.jobs import torchrun_job
from tools.servers.running import Prometheus, prometheus, read_json
from tools.servers.victoria import VictoriaMetrics, victoria_metrics, vmalert

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.long]

SCENARIOS = [
    replace(BY_NAME["non-finite-update"], arguments=("non-finite-on-request",)),
    BY_NAME["exception"],
]
TIME_SCALE = 1 / 20
"""Leaves the rules a `scrape_gap` of 9 s: on a busy machine VictoriaMetrics shows a sample only
some seconds after it took it."""
NOWHERE = "http://127.0.0.1:1"
EACH_PATHS_OWN = {"mp_agent_scrape_duration_seconds"}
CHANGING = {
    "mp_agent_counting_seconds",
    "mp_agent_export_last_success_timestamp_seconds",
    "mp_agent_pause_longest_seconds",
    "mp_agent_phase_longest_seconds",
    "mp_agent_standing_seconds",
}
"""Different at every scrape, also of a run that is over: ages, a maximum that fades, and the time
of the last push."""
TARGET_LABELS = {"__name__", "job", "instance"}
RESOURCE_PREFIXES = ("service_", "host_", "process_", "telemetry_", "k8s_", "scope_", "otel_")

Series = Mapping[tuple[str, frozenset[tuple[str, str]]], float]


@dataclass(frozen=True)
class Seen:
    """What one job left in both databases, and whom both evaluators alarmed."""

    scraped: Series
    pushed: Series
    by_prometheus: Mapping[str, set[str]]
    by_vmalert: Mapping[str, set[str]]


class AlertLog:
    """Keeps every alert that vmalert ever shows as firing."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._fired: set[tuple[str, str, str]] = set()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> "AlertLog":
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()

    def fired(self, run: str) -> dict[str, set[str]]:
        return by_name((name, severity) for own, name, severity in self._fired if own == run)

    def _watch(self) -> None:
        while not self._over.wait(0.2):
            for alert in read_json(f"{self._url}/api/v1/alerts")["data"]["alerts"]:
                labels = alert["labels"]
                if alert["state"] == "firing":
                    key = (labels.get("run", ""), labels["alertname"], labels["severity"])
                    self._fired.add(key)


@dataclass(frozen=True)
class Site:
    """The servers of both paths, side by side."""

    prometheus: Prometheus
    victoria: VictoriaMetrics
    alerts: AlertLog
    directory: Path
    addresses: dict[str, str]
    lock: threading.Lock

    def watch(self, scenario: Scenario) -> Seen:
        """Run a job that trains, and goes wrong, only once both databases have its ranks."""
        run = scenario.name
        watched, request = self.directory / f"{run}.watched", self.directory / run
        environment = {
            "MP_AGENT_LINGER_SECONDS": "120",
            "MP_AGENT_EXIT_WAIT_SECONDS": "10",
            "MP_AGENT_EXPORTERS": "prometheus,otlp",
            "OTEL_EXPORTER_OTLP_ENDPOINT": f"{self.victoria.url}/opentelemetry",
            "OTEL_METRIC_EXPORT_INTERVAL": "1000",
            "OTEL_LOGS_EXPORTER": "none",
            "NO_PROXY": "127.0.0.1",
            "WATCHED": str(watched),
            "GO": str(request),
        }
        with torchrun_job(
            (str(JOB), *(scenario.arguments or (run,))),
            run=run,
            log_file=self.directory / f"{run}.log",
            environment=environment,
        ) as job:
            status = wait_until(job.agent, seconds=90, what=f"the node agent\n{job.log_tail()}")
            with self.lock:
                self.addresses[run] = status.url.removeprefix("http://")
                self.prometheus.scrape(sorted(self.addresses.values()))
            for name, query in self.databases.items():
                self.wait_for_ranks(run, name, query)
            watched.touch()
            request.with_suffix(".bad").touch()
            for evaluator, fired in self.evaluators.items():
                self.wait_for_alerts(scenario, evaluator, fired)
            request.with_suffix(".end").touch()
            job.process.wait(120)
            return self.compare(run)

    @property
    def databases(self) -> Mapping[str, Callable[[str], list[dict[str, Any]]]]:
        return {"Prometheus": self.prometheus.query, "VictoriaMetrics": self.victoria.query}

    @property
    def evaluators(self) -> Mapping[str, Callable[[str], Mapping[str, set[str]]]]:
        return {"Prometheus": self.prometheus_fired, "vmalert": self.alerts.fired}

    def wait_for_ranks(
        self, run: str, database: str, query: Callable[[str], list[dict[str, Any]]]
    ) -> None:
        wait_until(
            lambda: len(query(f'mp_agent_rank_up{{run="{run}"}}')) == 2,
            seconds=90,
            what=f"both ranks of {run} in {database}",
            interval_seconds=0.2,
        )

    def wait_for_alerts(
        self,
        scenario: Scenario,
        evaluator: str,
        fired: Callable[[str], Mapping[str, set[str]]],
    ) -> None:
        wait_until(
            lambda: set(scenario.alerts) <= set(fired(scenario.name)),
            seconds=40,
            what=f"the alerts of {scenario.name} from {evaluator}",
            interval_seconds=0.2,
        )

    def prometheus_fired(self, run: str) -> dict[str, set[str]]:
        found = self.prometheus.query(
            f'max_over_time(ALERTS{{alertstate="firing",run="{run}"}}[10m])'
        )
        return by_name((f["metric"]["alertname"], f["metric"]["severity"]) for f in found)

    def compare(self, run: str) -> Seen:
        """Return what both sides hold once they hold the same, or after a while."""
        expression = f'{{__name__=~"mp_agent_.+",run="{run}"}}'
        deadline = time.monotonic() + 10 * BUSY_FACTOR
        while True:
            scraped = series(self.prometheus.query(expression))
            pushed = series(self.victoria.query(expression))
            if same(scraped, pushed) or time.monotonic() > deadline:
                break
            time.sleep(0.2)
        return Seen(scraped, pushed, self.prometheus_fired(run), self.alerts.fired(run))


def by_name(pairs: Any) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for name, severity in pairs:
        found.setdefault(name, set()).add(severity)
    return found


def series(found: list[dict[str, Any]]) -> Series:
    """Return values by name and labels, without what belongs to the target or the resource."""
    return {
        (
            row["metric"]["__name__"],
            frozenset(
                (name, value)
                for name, value in row["metric"].items()
                if name not in TARGET_LABELS and not name.startswith(RESOURCE_PREFIXES)
            ),
        ): float(row["value"][1])
        for row in found
        if row["metric"]["__name__"] not in EACH_PATHS_OWN
    }


def same(scraped: Series, pushed: Series) -> bool:
    # VictoriaMetrics keeps 12 digits.
    return scraped.keys() == pushed.keys() and all(
        pushed[key] == pytest.approx(value, rel=1e-9)
        for key, value in scraped.items()
        if key[0] not in CHANGING
    )


@contextmanager
def site(find: Callable[[str], Path], directory: Path) -> Iterator[Site]:
    rules = directory / "rules.yaml"
    command = (sys.executable, "-m", "mp_agent", "rules", "--time-scale", str(TIME_SCALE))
    subprocess.run([*command, "--output", str(rules)], check=True)
    with (
        prometheus(
            find("prometheus"), directory / "prometheus", rules=rules, alertmanager_url=NOWHERE
        ) as scraping,
        victoria_metrics(find("victoria-metrics"), directory / "victoria") as victoria,
        vmalert(
            find("vmalert"),
            directory / "vmalert",
            rules=rules,
            datasource_url=victoria.url,
            alertmanager_url=NOWHERE,
        ) as vmalert_url,
        AlertLog(vmalert_url) as alerts,
    ):
        yield Site(scraping, victoria, alerts, directory, {}, threading.Lock())


@pytest.fixture(scope="module")
def seen(server, tmp_path_factory) -> Iterator[dict[str, Future[Seen]]]:
    with (
        site(server, tmp_path_factory.mktemp("site")) as both,
        ThreadPoolExecutor(len(SCENARIOS)) as pool,
    ):
        yield {scenario.name: pool.submit(both.watch, scenario) for scenario in SCENARIOS}


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_every_series_is_the_same_scraped_and_pushed(scenario: Scenario, seen):
    found = seen[scenario.name].result()

    assert found.scraped.keys() == found.pushed.keys()
    for key, value in found.scraped.items():
        if key[0] not in CHANGING:
            assert found.pushed[key] == pytest.approx(value, rel=1e-9), key
    names = {name for name, _ in found.scraped}
    layer = "mp_agent_layer_grad_nonfinite_elements_total"
    assert {"mp_agent_steps_total", "mp_agent_rank_up", layer} <= names
    assert "mp_agent_step_duration_seconds_bucket" in names
    ranks = {dict(labels).get("rank") for _, labels in found.scraped}
    assert {"0", "1"} <= ranks


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_the_same_rule_file_fires_the_same_alerts(scenario: Scenario, seen):
    found = seen[scenario.name].result()

    assert set(found.by_prometheus) == set(found.by_vmalert) == set(scenario.alerts)
    for name, severity in scenario.alerts.items():
        assert severity in found.by_prometheus[name] and severity in found.by_vmalert[name]
