"""examples/sharded: every target is scraped by one shard, and the rules see the whole run."""

import json
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import yaml

from mp_agent.alerting.rules import RANK_RECORDS, render_rules
from mp_agent.alerting.values import values_in_force
from tests.waiting import wait_until
from tools.generators.sharded import FOLDER, REMOTE_WRITE, SHARDS, sharded_files
from tools.servers.running import read_json
from tools.servers.victoria import VictoriaMetrics, victoria_metrics, vmagent, vmalert
from tools.synthetic_store import Size, expositions

Server = Callable[[str], Path]
SIZE = Size(ranks=96, layers=4, hours=1, interval_seconds=1)
STEP = 1000


def example(name: str) -> dict[str, Any]:
    return dict(yaml.safe_load(sharded_files()[f"{FOLDER}/{name}"]))


def of_targets(example: dict[str, Any], addresses: list[str], directory: Path) -> Path:
    """Write an example's configuration for targets of this machine, on any port."""
    targets = directory / "targets.json"
    targets.write_text(json.dumps([{"targets": addresses}]))
    (job,) = example["scrape_configs"]
    job["file_sd_configs"] = [{"files": [str(targets)]}]
    assert "94(6" in job["relabel_configs"].pop(0)["regex"]
    example["global"]["scrape_interval"] = "1s"
    path = directory / "configuration.yml"
    path.write_text(yaml.safe_dump(example))
    return path


@pytest.mark.parametrize("name", [n for n in sharded_files() if "/prometheus-" in n])
def test_prometheus_takes_a_shards_configuration(name: str, server: Server, tmp_path: Path) -> None:
    path = tmp_path / "prometheus.yml"
    path.write_text(sharded_files()[name])
    done = subprocess.run(
        [server("promtool"), "check", "config", "--agent", path], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


def kept_of(promtool: Path, configuration: Path) -> list[str]:
    """Return the targets that a configuration keeps; promtool looks for so many seconds."""
    for seconds in (1, 10, 60):
        done = subprocess.run(
            [
                promtool,
                *("check", "service-discovery", f"--timeout={seconds}s"),
                configuration,
                "mp-agent",
            ],
            capture_output=True,
            text=True,
            check=True,
        )
        kept = [one["labels"]["instance"] for one in json.loads(done.stdout) if one["labels"]]
        if kept:
            break
    return kept


def test_each_target_is_of_one_shard_of_prometheus(server: Server, tmp_path: Path) -> None:
    addresses = [f"10.0.{number // 256}.{number % 256}:9464" for number in range(200)]
    owners: Counter[str] = Counter()
    for shard in range(SHARDS):
        path = of_targets(example(f"mimir/prometheus-{shard}.yml"), addresses, tmp_path)
        kept = kept_of(server("promtool"), path)
        assert len(kept) > len(addresses) / SHARDS / 2
        owners.update(kept)
    assert set(owners) == set(addresses)
    assert set(owners.values()) == {1}


def test_stores_differ_in_where_shards_write_to() -> None:
    for shard in range(SHARDS):
        shards = [example(f"{store}/prometheus-{shard}.yml") for store in REMOTE_WRITE]
        assert [one.pop("remote_write") for one in shards] == [
            [{"url": url}] for url, _ in REMOTE_WRITE.values()
        ]
        assert all(one == shards[0] for one in shards)


def test_vmagent_takes_its_configuration(server: Server, tmp_path: Path) -> None:
    path = tmp_path / "vmagent.yml"
    path.write_text(sharded_files()[f"{FOLDER}/victoriametrics/vmagent.yml"])
    wrong = tmp_path / "wrong.yml"
    wrong.write_text(path.read_text().replace("action: keep", "action: keeep"))
    done = [
        subprocess.run(
            [server("vmagent"), "-dryRun", f"-promscrape.config={file}"],
            capture_output=True,
            text=True,
        )
        for file in (path, wrong)
    ]
    assert done[0].returncode == 0
    # It ends with 0 where it skips what it cannot parse, too.
    assert ["\terror\t" in one.stderr for one in done] == [False, True]


def test_the_services_know_each_other_and_the_vmagents_share_all_targets() -> None:
    services = example("victoriametrics/compose.yaml")["services"]
    numbers = []
    for name, service in services.items():
        options = dict(word.lstrip("-").split("=", 1) for word in service["command"])
        for option, value in options.items():
            if option.endswith(".url") and "alertmanager" not in value:
                assert value.startswith("http://victoria-metrics:8428")
        if name.startswith("vmagent-"):
            assert options["promscrape.cluster.membersCount"] == str(SHARDS)
            numbers.append(int(options["promscrape.cluster.memberNum"]))
    assert numbers == list(range(SHARDS))


class _Agent(BaseHTTPRequestHandler):
    """Answers every scrape with the same text."""

    text: bytes

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/plain")
        self.send_header("Content-Length", str(len(self.text)))
        self.end_headers()
        self.wfile.write(self.text)

    def log_message(self, format: str, *arguments: Any) -> None:
        pass


@contextmanager
def agents(texts: list[str]) -> Iterator[list[str]]:
    """Serve the texts, each on a port of its own, and yield their addresses."""
    with ExitStack() as stack:
        addresses = []
        for text in texts:
            handler = type("_Own", (_Agent,), {"text": text.encode()})
            one = stack.enter_context(ThreadingHTTPServer(("127.0.0.1", 0), handler))
            thread = Thread(target=one.serve_forever, kwargs={"poll_interval": 0.05})
            thread.start()
            stack.callback(thread.join)
            stack.callback(one.shutdown)
            addresses.append(f"127.0.0.1:{one.server_address[1]}")
        yield addresses


def scraped(url: str) -> list[str]:
    """Return the targets that a vmagent has scraped with success."""
    active = read_json(f"{url}/api/v1/targets?state=active")["data"]["activeTargets"]
    return [one["labels"]["instance"] for one in active if one["health"] == "up"]


def one_value(store: VictoriaMetrics, expression: str) -> float | None:
    found = store.query(expression)
    return float(found[0]["value"][1]) if found else None


@pytest.mark.e2e
@pytest.mark.slow
def test_two_vmagents_scrape_each_target_once_and_the_rules_see_the_run(
    server: Server, tmp_path: Path
) -> None:
    texts = expositions(SIZE, STEP)
    series = sum(text.count("\n") for text in texts)
    with ExitStack() as stack:
        addresses = stack.enter_context(agents(texts))
        store = stack.enter_context(victoria_metrics(server("victoria-metrics"), tmp_path / "vm"))
        configuration = of_targets(example("victoriametrics/vmagent.yml"), addresses, tmp_path)
        shards = [
            stack.enter_context(
                vmagent(
                    server("vmagent"),
                    tmp_path / f"vmagent-{number}",
                    configuration=configuration,
                    shard=number,
                    shards=2,
                    store_url=store.url,
                )
            )
            for number in range(2)
        ]
        wait_until(lambda: sum(len(scraped(url)) for url in shards) >= len(addresses), seconds=120)
        own = [scraped(url) for url in shards]
        assert sorted(own[0] + own[1]) == sorted(addresses)
        assert own[0] and own[1]

        ours = '{__name__=~"mp_agent_.+"}'
        wait_until(lambda: one_value(store, f"count({ours})") == series, seconds=120)
        assert one_value(store, "count(mp_agent_rank_up)") == SIZE.ranks
        ranks = store.query("count by (rank) (mp_agent_rank_up)")
        assert {float(one["value"][1]) for one in ranks} == {1.0}

        rules = tmp_path / "rules.yaml"
        rules.write_text(render_rules(values_in_force()))
        alerting = stack.enter_context(
            vmalert(
                server("vmalert"),
                tmp_path / "vmalert",
                rules=rules,
                datasource_url=store.url,
                alertmanager_url="http://127.0.0.1:9",
            )
        )
        wait_until(lambda: one_value(store, "run:mp_agent_rank_up:sum") == SIZE.ranks, seconds=120)
        names = f'{{__name__=~"{"|".join(sorted(RANK_RECORDS))}"}}'
        wait_until(
            lambda: (
                {
                    "run_lag:mp_agent_rank_step:count",
                    "run:mp_agent_rank_loss:median",
                    "run:mp_agent_rank_compute_seconds:max",
                }
                <= {one["metric"]["__name__"] for one in store.query(names)}
            ),
            seconds=120,
        )
        groups = read_json(f"{alerting}/api/v1/rules")["data"]["groups"]
        errors = {r["name"]: r["lastError"] for g in groups for r in g["rules"] if r["lastError"]}
        assert errors == {}
        assert sum(len(group["rules"]) for group in groups) == len(rules_of(rules))


def rules_of(path: Path) -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(path.read_text())["groups"] for rule in group["rules"]]
