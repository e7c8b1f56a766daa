"""One run on three hosts of two ranks: the root agent has all of it, each agent its own ranks."""

import os
import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.hosts.network import Job, Network, network

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.long]

JOB = Path(__file__).parent / "job.py"
STEPS = 12


def reference_norm(job: Job, step: int) -> float:
    found = re.search(rf"^norm {step} (\S+)$", job.log(), re.MULTILINE)
    assert found, job.logs()
    return float(found[1])


@pytest.mark.parametrize(
    ("nodes", "starter", "wrapper"),
    [(3, Network.start_unnamed, "ddp"), (2, Network.start_as_srun, "fsdp2")],
)
def test_the_root_has_the_whole_run_and_every_agent_its_own_ranks(
    tmp_path: Path, nodes: int, starter: Callable[..., Job], wrapper: str
):
    """However the ranks were started; and no step is lost though a host starts after the others."""
    gate = tmp_path / "gate"
    with network(nodes, tmp_path) as hosts:
        job = starter(
            hosts,
            JOB,
            *("--wrapper", wrapper, "--steps", str(STEPS), "--gate", str(gate)),
            push_interval_seconds="0.5",
            merge_deadline_seconds="5",
        )
        job.wait_for("done", times=2 * nodes)
        (run,) = set.union(*(host.runs() for host in hosts))
        root = hosts[0]
        merged = job.until(
            lambda: (m := root.metrics(run)).get("step") == STEPS and m,
            "the last step at the root",
        )
        assert merged["coverage_ratio"] == 1
        assert merged["steps_total"] == STEPS
        assert merged["grad_norm"] == pytest.approx(reference_norm(job, STEPS), rel=1e-6)
        (info,) = (name for name in merged if name.startswith("run_info{"))
        assert {str(2 * nodes), str(nodes)} <= set(info[9:-1].split(","))
        assert merged["nodes_known{0}"] == nodes

        for number, host in enumerate(hosts):
            own = host.metrics(run)
            ranks = {int(name[8:-1]) for name in own if name.startswith("rank_up{")}
            assert ranks == {2 * number, 2 * number + 1}
            assert ("grad_norm" in own) is (host is root)
            assert own[f"records_dropped_total{{{number}}}"] == 0

        addresses = {target["targets"][0] for target in root.targets(run)}
        assert addresses == {f"{host.address}:9464" for host in hosts}
        for address in addresses:
            assert b"mp_agent_rank_up" in hosts[1].get(f"http://{address}/metrics")

        gate.touch()
        assert set(job.wait()) == {0}, job.logs()
        job.until(lambda: root.metrics(run)["run_active"] == 0, "the end at the root")
        assert root.metrics(run)["run_end_info{completed}"] == 1


def test_a_root_that_lingers_falls_silent_when_the_run_goes_on_under_another(tmp_path: Path):
    """The ranks of the first host and their launcher die, its node agent does not."""
    with network(3, tmp_path) as hosts:
        job = hosts.start(
            JOB,
            *("--steps", "100000", "--pause", "0.05"),
            run="llama",
            least_hosts=2,
            rendezvous_host=1,
            max_restarts=3,
            # With a shared store torchrun would send the others to the host that is gone.
            environment={"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
            push_interval_seconds="1",
        )
        old, new, other = hosts
        job.until(
            lambda: (
                old.agent("llama")
                and (m := old.metrics("llama")).get("nodes_known{0}") == 3
                and "grad_norm" in m
            ),
            "a step of three nodes at the first root",
        )
        agent = old.wait_for_agent("llama")
        for pid in old.pids("job.py").values():
            os.kill(pid, signal.SIGKILL)

        job.until(lambda: "grad_norm" in new.metrics("llama"), "the second attempt")
        job.until(lambda: "grad_norm" not in old.metrics("llama"), "the silence of the old root")
        assert old.wait_for_agent("llama").pid == agent.pid
        left = old.metrics("llama")
        assert not any(name.startswith(("run_", "layer_", "steps_total")) for name in left)
        assert left["rank_up{0}"] == 0

        merged = job.until(
            lambda: (m := new.metrics("llama"))["coverage_ratio"] == 1 and m,
            "the rows of the other host",
        )
        assert merged["run_active"] == 1
        assert merged["nodes_known{0}"] == 2
        addresses = [target["targets"][0] for target in new.targets("llama")]
        assert addresses == [f"{new.address}:9464", f"{other.address}:9464"]
