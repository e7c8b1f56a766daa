"""What `helm test` runs says what is wrong, asked of a real Prometheus."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from mp_agent.alerting.rules import render_rules
from mp_agent.alerting.values import values_in_force
from tests.helm.rendering import CHART, objects_of, of_kind
from tests.waiting import wait_until
from tools.servers.running import read_json, serving

POOL = "podMonitor/monitoring/demo-mp-agent/0"
Ask = Callable[..., "subprocess.CompletedProcess[str]"]


def container() -> Mapping[str, Any]:
    (pod,) = of_kind(objects_of("everything"), "Pod")
    (found,) = pod["spec"]["containers"]
    return dict(found)


@pytest.fixture(scope="module")
def prometheus(
    server: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """A Prometheus with the rules and with the scrape pool that the operator would make."""
    folder = tmp_path_factory.mktemp("prometheus")
    (folder / "rules.yaml").write_text(render_rules(values_in_force()))
    with configured(server("prometheus"), folder, rules=["rules.yaml"], pools=[POOL]) as url:
        yield url


@contextmanager
def configured(binary: Path, folder: Path, *, rules: list[str], pools: list[str]) -> Iterator[str]:
    """Run Prometheus with these rule files; each pool scrapes the same, absent, target."""
    jobs = [{"job_name": pool, "static_configs": [{"targets": ["127.0.0.1:9"]}]} for pool in pools]
    configuration = {"rule_files": rules, "scrape_configs": jobs}
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(configuration))
    arguments = [
        f"--config.file={folder / 'prometheus.yaml'}",
        f"--storage.tsdb.path={folder / 'data'}",
    ]
    with serving(binary, arguments, folder / "log") as url:
        targets = f"{url}/api/v1/targets"
        wait_until(
            lambda: len(read_json(targets)["data"]["activeTargets"]) == len(pools),
            what="the targets",
        )
        yield url


def test_the_pod_runs_the_check_with_what_the_release_made() -> None:
    pod = container()
    assert pod["args"] == [(CHART / "files" / "check_release.py").read_text("utf-8")]
    given = {one["name"]: one["value"] for one in pod["env"]}
    assert given == {
        "PROMETHEUS_URL": "http://prometheus.monitoring:9090",
        "RULES": "true",
        "POD_MONITOR": POOL.removeprefix("podMonitor/").removesuffix("/0"),
    }


def check(**variables: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-c", *container()["args"]],
        env={"PATH": os.environ["PATH"], **variables},
        capture_output=True,
        text=True,
    )


def test_a_wrong_setting_is_named() -> None:
    checked = check(MP_AGENT_LAYER_INTERVAL="often")
    assert checked.returncode == 1
    assert "MP_AGENT_LAYER_INTERVAL has value 'often'" in checked.stderr


@pytest.mark.e2e
def test_rules_and_monitor_that_prometheus_has_are_found_and_others_are_missed(
    prometheus: str,
) -> None:
    known = check(PROMETHEUS_URL=prometheus, RULES="true", POD_MONITOR="monitoring/demo-mp-agent")
    assert (known.returncode, known.stdout) == (0, "ok\n"), known.stderr
    missed = check(PROMETHEUS_URL=prometheus, POD_MONITOR="monitoring/other")
    assert missed.returncode == 1
    assert "does not know the PodMonitor monitoring/other" in missed.stderr
    absent = check(PROMETHEUS_URL="http://127.0.0.1:1", RULES="true")
    assert absent.returncode == 1
    assert "http://127.0.0.1:1/api/v1/rules" in absent.stderr


@pytest.mark.e2e
def test_a_second_release_with_the_same_pods_or_rules_is_named(
    server: Callable[[str], Path], tmp_path: Path
) -> None:
    for name in ("first.yaml", "second.yaml"):
        (tmp_path / name).write_text(render_rules(values_in_force()))
    other = "podMonitor/monitoring/other-mp-agent/0"
    files, pools = ["first.yaml", "second.yaml"], [POOL, other]
    with configured(server("prometheus"), tmp_path, rules=files, pools=pools) as url:
        scraped = check(PROMETHEUS_URL=url, POD_MONITOR="monitoring/demo-mp-agent")
        loaded = check(PROMETHEUS_URL=url, RULES="true")
    assert scraped.returncode == loaded.returncode == 1
    assert f"scraped by {other} too: see Several releases" in scraped.stderr
    assert "more alerts twice: see Several releases" in loaded.stderr
