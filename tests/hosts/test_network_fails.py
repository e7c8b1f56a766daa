"""The network between nodes goes and comes back, and a rank gets stuck, while all train on."""

import signal
from pathlib import Path

import pytest

from tests.hosts.failures import missing_ranks, rank_pid, start
from tests.hosts.network import network

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

RANKS = range(6)


def test_hosts_that_are_cut_off_and_a_rank_that_is_stuck_cost_coverage_alone(tmp_path: Path):
    """The ranks train without each other, as if their own network were another one."""
    with network(3, tmp_path) as hosts:
        job = start(hosts, tmp_path, "--alone", lost_after_seconds=600)
        job.begin()
        job.until_whole("a step of all ranks")

        hosts[2].cut()
        without = job.until("the loss of a node", coverage_ratio=4 / 6, missing=2)
        assert missing_ranks(without) == {4, 5}
        assert without["run_active"] == 1
        served = job.metrics(2)["rank_step{4}"]
        job.goes_on(*RANKS)
        job.until("its own ranks", 2, **{"rank_up{4}": 1, "rank_up{5}": 1})
        assert job.metrics(2)["rank_step{4}"] > served
        hosts[2].restore()
        job.until_whole("the node that is back")

        hosts[0].cut()
        alone = job.until("the loss of all other nodes", coverage_ratio=2 / 6, missing=4)
        assert missing_ranks(alone) == {2, 3, 4, 5}
        job.goes_on(*RANKS)
        hosts[0].restore()
        job.until_whole("both nodes that are back")

        pid = rank_pid(hosts[1], 1)
        hosts[1].signal(pid, signal.SIGUSR1)
        stuck = job.until("the loss of a rank", coverage_ratio=5 / 6, missing=1)
        assert missing_ranks(stuck) == {3}
        assert job.metrics(1)["rank_up{3}"] == 1, "it lives"
        job.goes_on(*(rank for rank in RANKS if rank != 3))
        hosts[1].signal(pid, signal.SIGUSR2)
        job.until_whole("the rank that is back")

        last = job.finish()
        end = job.until("the end", run_active=0, steps_total=last)
        assert end["run_end_info{completed}"] == 1
