"""An elastic job gains a host, loses a rank and then the root's host; counters go on."""

import signal
from pathlib import Path

import pytest

from tests.hosts.failures import OWN_STORE, RUN, Failing, rank_pid, start
from tests.hosts.network import network

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.long]


def steps_made(job: Failing) -> list[int]:
    """Return the last step that rank 0 printed in each attempt, in order."""
    attempts: list[int] = []
    for line in "".join(job.job.log(index) for index in range(2)).splitlines():
        if line.startswith("rank 0 step "):
            step = int(line.rpartition(" ")[2])
            if step == 1:
                attempts.append(1)
            else:
                attempts[-1] = step
    return attempts


def test_a_host_that_joins_a_rank_that_is_killed_and_the_end_of_the_roots_host(tmp_path: Path):
    with network(3, tmp_path) as hosts:
        elastic = {"rendezvous_host": 1, "least_hosts": 2, "max_restarts": 3}
        job = start(hosts, tmp_path, on=hosts.hosts[:2], environment=OWN_STORE, **elastic)
        job.begin()
        two = job.until_whole("a step of two hosts")
        assert two["nodes_known{0}"] == 2
        agent = hosts[0].wait_for_agent(RUN)

        # torchrun starts all ranks again. It counts that where ranks whose peers it has ended fail
        # before it looks for hosts that wait.
        newcomer = start(hosts, tmp_path, on=[hosts[2]], environment=OWN_STORE, **elastic)
        newcomer.begin()
        three = job.until("all hosts", coverage_ratio=1, missing=0, **{"nodes_known{0}": 3})
        assert three["steps_total"] > two["steps_total"]
        assert any(name.startswith("run_info{") and name.endswith(",6}") for name in three)
        for number in range(3):
            ranks = {f"rank_up{{{rank}}}": 1 for rank in (2 * number, 2 * number + 1)}
            own = job.until("its own ranks, and no others", number, **ranks)
            assert sum(name.startswith("rank_up{") for name in own) == 2
        assert hosts[0].wait_for_agent(RUN).pid == agent.pid

        hosts[1].signal(rank_pid(hosts[1], 0), signal.SIGKILL)
        attempts = len(steps_made(job)) + 1
        job.job.until(lambda: len(steps_made(job)) == attempts, "the next attempt")
        again = job.until_whole("a step of the next attempt")
        assert again["run_active"] == 1
        *ended, last = steps_made(job)
        # Of each attempt that is killed the step under way may count or not.
        assert sum(ended) <= again["steps_total"] <= sum(ended) + len(ended) + last
        status = hosts[0].wait_for_agent(RUN)
        assert (status.pid, status.port) == (agent.pid, agent.port)

        hosts[0].kill()
        left = job.job.until(
            lambda: (
                (m := job.metrics(1)).get("coverage_ratio") == 1
                and m.get("nodes_known{0}") == 2
                and m
            ),
            "a step of the hosts that are left",
        )
        assert left["run_active"] == 1
        assert any(name.startswith("run_info{") and name.endswith(",4}") for name in left)
        addresses = [target["targets"][0] for target in hosts[1].targets(RUN)]
        assert addresses == [f"{host.address}:9464" for host in (hosts[1], hosts[2])]
