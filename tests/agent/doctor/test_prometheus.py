"""The doctor asks a Prometheus: a real one, and servers that answer as one in trouble does."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from mp_agent.alerting.conditions import CONDITIONS
from mp_agent.cli import main
from mp_agent.doctor.command import PROMETHEUS_CHECKS
from mp_agent.doctor.machine import CheckStatus, Machine
from mp_agent.settings import Settings
from tests.agent.doctor.conftest import answering, found, only, verdicts
from tests.waiting import wait_until
from tools.servers.running import prometheus

NAMES = [condition.name for condition in CONDITIONS]


def prometheus_says(path: str, data: Any) -> dict[str, tuple[int, str]]:
    return {f"/api/v1/{path}": (200, json.dumps({"status": "success", "data": data}))}


@pytest.mark.e2e
def test_a_real_prometheus_is_wrong_until_it_scrapes_then_fine_but_for_a_down_target(
    server: Callable[[str], Path], watched: Settings, tmp_path: Path
) -> None:
    (status,) = Machine(watched).agents
    rules = tmp_path / "mp_agent.rules.yaml"
    assert CliRunner().invoke(main, ["rules", "--output", str(rules)]).exit_code == 0
    with prometheus(
        server("prometheus"),
        tmp_path / "prometheus",
        rules=rules,
        alertmanager_url="http://127.0.0.1:1",
    ) as running:

        def machine() -> Machine:
            return Machine(watched, prometheus=running.url, run="llama")

        assert verdicts("prometheus", machine()) == {CheckStatus.OK}
        assert verdicts("targets", machine()) == {CheckStatus.WRONG}
        assert verdicts("series", machine()) == {CheckStatus.WRONG}
        running.scrape([status.url.removeprefix("http://"), "127.0.0.1:1"])
        wait_until(lambda: running.query("mp_agent_build_info"), seconds=60, what="series")
        wait_until(lambda: verdicts("targets", machine()) == {CheckStatus.OK, CheckStatus.WRONG})
        seen = machine()
        for check in PROMETHEUS_CHECKS:
            if check.name != "targets":
                assert verdicts(check.name, seen) == {CheckStatus.OK}, found(check.name, seen)
        scraped, refused = sorted(found("targets", seen), key=lambda finding: finding.verdict.value)
        assert (scraped.verdict, refused.verdict) == (CheckStatus.OK, CheckStatus.WRONG)
        assert status.url in scraped.text
        assert "refused" in refused.text
        called = CliRunner(env={"MP_AGENT_DIR": str(watched.dir), "MP_AGENT_PORT": "0"}).invoke(
            main, ["doctor", "--prometheus", running.url, "--run", "llama", "--json"]
        )
        report = json.loads(called.output)
        names = [check["name"] for check in report["checks"]]
        assert names[-6:] == [check.name for check in PROMETHEUS_CHECKS]


def test_what_is_no_prometheus_is_wrong_once_and_unknown_after_that(settings: Settings) -> None:
    with answering({"/api/v1/status/buildinfo": (200, "[]")}) as url:
        machine = Machine(settings, prometheus=url)
        first, *others = (check.name for check in PROMETHEUS_CHECKS)
        assert verdicts(first, machine) == {CheckStatus.WRONG}
        for check in others:
            assert verdicts(check, machine) == {CheckStatus.UNKNOWN}, check


def test_no_target_is_expected_of_an_agent_that_only_pushes() -> None:
    with answering(prometheus_says("targets", {"activeTargets": []})) as url:
        pushing = Machine(Settings(exporters=("otlp",)), prometheus=url)
        assert verdicts("targets", pushing) == {CheckStatus.OK}
        assert verdicts("targets", Machine(Settings(), prometheus=url)) == {CheckStatus.WRONG}


@pytest.mark.parametrize(
    ("error", "hint"),
    [
        ("server returned HTTP status 401 Unauthorized", "basic_auth"),
        ("sample limit exceeded", "sample_limit"),
        ("tls: failed to verify certificate: x509", "tls_config"),
        ("http: server gave HTTP response to HTTPS client", "scheme"),
        ("server returned HTTP status 404 Not Found", "another program"),
        ("dial tcp: connection refused", "firewall"),
    ],
)
def test_a_failed_scrape_is_reported_with_its_remedy(
    error: str, hint: str, settings: Settings
) -> None:
    target = {
        "scrapeUrl": "http://10.0.0.1:9464/metrics",
        "health": "down",
        "lastError": error,
        "labels": {"job": "mp-agent"},
    }
    other = {**target, "labels": {"job": "node"}, "scrapeUrl": "http://10.0.0.1:9100/metrics"}
    with answering(prometheus_says("targets", {"activeTargets": [other, target]})) as url:
        finding = only("targets", Machine(settings, prometheus=url))
    assert finding.verdict is CheckStatus.WRONG
    assert error in finding.text
    assert hint in finding.remedy


def rules_of(*names: str, **changes: str) -> dict[str, tuple[int, str]]:
    rules = [{"name": name, "type": "alerting", "health": "ok", **changes} for name in names]
    return prometheus_says("rules", {"groups": [{"rules": rules}]})


def test_rules_that_are_absent_or_fail_are_reported(settings: Settings) -> None:
    with answering(rules_of("SomethingElse")) as url:
        assert verdicts("rules", Machine(settings, prometheus=url)) == {CheckStatus.WRONG}
    with answering(rules_of(*NAMES[1:])) as url:
        finding = only("rules", Machine(settings, prometheus=url))
        assert finding.verdict is CheckStatus.UNKNOWN
        assert finding.text == f"not loaded: {NAMES[0]}"
    with answering(rules_of(*NAMES, health="err", lastError="many-to-many")) as url:
        findings = found("rules", Machine(settings, prometheus=url))
        assert "many-to-many" in findings[0].text
        assert findings[0].verdict is CheckStatus.WRONG


def test_alerts_without_an_alertmanager_are_reported(settings: Settings) -> None:
    with answering(prometheus_says("alertmanagers", {"activeAlertmanagers": []})) as url:
        assert verdicts("alertmanager", Machine(settings, prometheus=url)) == {CheckStatus.WRONG}


def test_alerts_that_fire_are_reported_for_the_run_alone(settings: Settings) -> None:
    def alert(name: str, run: str, state: str = "firing") -> dict[str, Any]:
        return {
            "state": state,
            "labels": {"alertname": name, "run": run, "severity": "critical"},
        }

    alerts = [alert(NAMES[0], "llama"), alert(NAMES[0], "gpt"), alert("Watchdog", "llama")]
    pending = alert(NAMES[1], "llama", "pending")
    with answering(prometheus_says("alerts", {"alerts": [*alerts, pending]})) as url:
        finding = only("alerts", Machine(settings, prometheus=url, run="llama"))
    assert finding.text == f"firing: {NAMES[0]} (critical, run llama)"
