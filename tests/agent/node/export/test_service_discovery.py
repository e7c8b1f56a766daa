"""A real Prometheus finds the node agents of a run of two nodes by http_sd and by file_sd."""

import json
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from mp_agent.records.steps import EndReason
from mp_agent.ring import locations
from mp_agent.ring.locations import AgentStatus
from mp_agent.settings import Settings
from tests.agent.node.agent_process import get, scrape, start_agent, wait_for_status
from tests.agent.node.fake_rank import FakeRank
from tests.waiting import wait_until
from tools.servers.running import read_json, serving

TOKEN = "shared-secret"


@dataclass
class TwoNodes:
    """A run of two nodes on this machine, each with two ranks and its node agent."""

    statuses: list[AgentStatus]
    agents: list["subprocess.Popen[bytes]"]
    ranks: list[FakeRank]
    sd_dir: Path

    @property
    def addresses(self) -> set[str]:
        return {status.url.removeprefix("http://") for status in self.statuses}

    def files(self) -> list[Path]:
        """Return what Prometheus would read: a file is written under a hidden name first."""
        return sorted(self.sd_dir.glob("[!.]*"))


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[TwoNodes]:
    """Start root and other node; the second knows the first by its settings."""
    found = TwoNodes([], [], [], tmp_path / "sd")
    found.sd_dir.mkdir()
    with ExitStack() as stack:
        for node in (0, 1):
            base = tmp_path / f"shm{node}"
            run_dir = locations.run_directory(base, "llama")
            for rank in (2 * node, 2 * node + 1):
                fake = FakeRank(
                    run_dir,
                    rank,
                    world_size=4,
                    local_rank=rank % 2,
                    local_world_size=2,
                    node_rank=node,
                    host=f"node{node}",
                    launch=f"launcher{node}",
                )
                found.ranks.append(stack.enter_context(fake))
            settings = Settings(
                port=0,
                bind="127.0.0.1",
                dir=base,
                log_dir=tmp_path / "log",
                push_interval_seconds=0.2,
                linger_seconds=60,
                sd_dir=found.sd_dir,
                root=found.statuses[0].url if node else "",
                token=TOKEN,
            )
            agent = start_agent(settings, "--run-dir", run_dir)
            stack.callback(agent.wait)
            stack.callback(agent.kill)
            found.agents.append(agent)
            status = wait_until(
                lambda: (s := wait_for_status(run_dir)).port and s,  # noqa: B023
                what="an agent that serves",
            )
            found.statuses.append(status)
        yield found


def discovered(nodes: TwoNodes) -> set[str]:
    body, _ = get(f"{nodes.statuses[0].url}/sd")
    return {target for group in json.loads(body) for target in group["targets"]}


@pytest.mark.slow
def test_prometheus_finds_and_scrapes_all_nodes_both_ways(
    nodes: TwoNodes, server: Callable[[str], Path], tmp_path: Path
):
    relabelling = [{"source_labels": ["__meta_mp_agent_node_rank"], "target_label": "node_rank"}]
    jobs: dict[str, dict[str, Any]] = {
        "http": {
            "http_sd_configs": [{"url": f"{nodes.statuses[0].url}/sd", "refresh_interval": "1s"}]
        },
        "file": {
            "file_sd_configs": [{"files": [f"{nodes.sd_dir}/*.json"], "refresh_interval": "1s"}]
        },
    }
    configuration = {
        "global": {"scrape_interval": "1s"},
        "scrape_configs": [
            {"job_name": name, "relabel_configs": relabelling, **job} for name, job in jobs.items()
        ],
    }
    file = tmp_path / "prometheus" / "prometheus.yaml"
    file.parent.mkdir()
    file.write_text(yaml.safe_dump(configuration))
    arguments = [f"--config.file={file}", f"--storage.tsdb.path={tmp_path / 'prometheus/data'}"]
    with serving(server("prometheus"), arguments, tmp_path / "prometheus.log") as url:

        def up() -> set[tuple[str, str]]:
            active = read_json(f"{url}/api/v1/targets?state=active")["data"]["activeTargets"]
            return {
                (target["labels"]["job"], target["labels"]["instance"])
                for target in active
                if target["health"] == "up"
            }

        expected = {(job, address) for job in jobs for address in nodes.addresses}
        wait_until(lambda: up() == expected, seconds=30, what="four healthy targets")

        def ranks() -> list[tuple[str, str, str]]:
            answer = read_json(f"{url}/api/v1/query?query=mp_agent_rank_up")
            series = [item["metric"] for item in answer["data"]["result"]]
            assert all(labels["run"] == "llama" for labels in series)
            assert not any(name.startswith("exported_") for labels in series for name in labels)
            return sorted((x["job"], x["node_rank"], x["rank"]) for x in series)

        pairs = (("0", "0"), ("0", "1"), ("1", "2"), ("1", "3"))
        wait_until(
            lambda: ranks() == sorted((job, *pair) for job in jobs for pair in pairs),
            what="the ranks of both nodes, each from its own",
        )


@pytest.mark.slow
def test_the_root_lists_all_nodes_and_the_other_itself(nodes: TwoNodes):
    wait_until(lambda: discovered(nodes) == nodes.addresses, what="both nodes at the root")
    body, headers = get(f"{nodes.statuses[0].url}/sd")
    assert headers["Content-Type"].startswith("application/json")
    first, second = json.loads(body)
    assert second["labels"] == {
        "__meta_mp_agent_run": "llama",
        "__meta_mp_agent_attempt": "0",
        "__meta_mp_agent_node_rank": "1",
        "__meta_mp_agent_host": "node1",
    }
    assert first["labels"]["__meta_mp_agent_host"] == "node0"
    (own,) = json.loads(get(f"{nodes.statuses[1].url}/sd")[0])
    assert own["labels"]["__meta_mp_agent_node_rank"] == "1"


@pytest.mark.slow
def test_the_file_is_the_roots_readable_by_all_and_gone_with_its_agent(nodes: TwoNodes):
    def listed() -> list[str]:
        files = nodes.files()
        return [g["targets"][0] for g in json.loads(files[0].read_text())] if files else []

    wait_until(lambda: set(listed()) == nodes.addresses, what="both nodes in the file")
    (file,) = nodes.files()
    assert file.stat().st_mode & 0o777 == 0o644
    nodes.agents[0].terminate()
    assert nodes.agents[0].wait(10) == 0
    assert nodes.files() == []


@pytest.mark.slow
def test_rows_reach_the_root_and_the_status_says_when_the_end_did(nodes: TwoNodes):
    for rank in nodes.ranks:
        rank.steps(3, gradients={"sum_squares": 4.0})
    root, other = nodes.statuses
    wait_until(lambda: scrape(root).get("step") == 3, what="the merged steps")
    assert scrape(root)["coverage_ratio"] == 1
    assert scrape(root)["nodes_known{0}"] == 2
    assert "step" not in scrape(other)
    assert scrape(other)["push_sent_bytes_total{1}"] > 0
    assert scrape(other)["push_failures_total{1}"] == 0

    run_dir = nodes.ranks[2].path.parent.parent

    def status() -> AgentStatus:
        found = locations.read_status(run_dir)
        assert found is not None
        return found

    assert status().pushes_total > 0
    assert not status().final_pushed
    for rank in nodes.ranks:
        rank.end(EndReason.COMPLETED)
    wait_until(lambda: status().final_pushed, what="the end at the root")
    wait_until(lambda: scrape(root)["run_active"] == 0, what="the end of the run")


@pytest.mark.slow
def test_an_agent_that_takes_over_keeps_the_port(nodes: TwoNodes, tmp_path: Path):
    nodes.agents[0].kill()
    nodes.agents[0].wait()
    run_dir = nodes.ranks[0].path.parent.parent
    settings = Settings(
        port=0, bind="127.0.0.1", dir=run_dir.parent, log_dir=tmp_path / "log", token=TOKEN
    )
    successor = start_agent(settings, "--run-dir", run_dir)
    try:
        status = wait_for_status(run_dir, pid=successor.pid)
        status = wait_until(
            lambda: (s := wait_for_status(run_dir, pid=successor.pid)).port and s, what="the port"
        )
        assert status.port == nodes.statuses[0].port
        wait_until(lambda: discovered(nodes) == nodes.addresses, what="the other node's rows again")
    finally:
        successor.kill()
        successor.wait()


@pytest.mark.slow
def test_nothing_of_the_token_is_seen_outside(nodes: TwoNodes, tmp_path: Path):
    wait_until(lambda: discovered(nodes) == nodes.addresses, what="both nodes at the root")
    for agent, status in zip(nodes.agents, nodes.statuses, strict=True):
        assert TOKEN.encode() not in Path(f"/proc/{agent.pid}/cmdline").read_bytes()
        for path in ("/metrics", "/sd"):
            assert TOKEN.encode() not in get(f"{status.url}{path}")[0]
    for file in [*(tmp_path / "sd").iterdir(), *tmp_path.rglob("*.json"), *tmp_path.rglob("*.log")]:
        assert TOKEN.encode() not in file.read_bytes()
