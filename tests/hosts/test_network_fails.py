"""The network between nodes goes and comes back, nodes and ranks get stuck and go on."""

import signal
from pathlib import Path

import pytest

from mp_agent.node.accounting.ranks import STANDING_SECONDS
from tests.hosts.failures import BOUND_SECONDS, missing_ranks, rank_pid, start
from tests.hosts.network import network

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.long]

RANKS = range(6)


def test_hosts_that_are_cut_off_or_stand_still_and_a_stuck_rank_cost_coverage_alone(tmp_path: Path):
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

        hosts[1].pause()
        asleep = job.until("the silence of a node", coverage_ratio=4 / 6, missing=2)
        assert missing_ranks(asleep) == {2, 3}
        assert asleep["run_active"] == 1
        job.goes_on(0, 1, 4, 5)
        hosts[1].resume()
        job.until_whole("the node that goes on")

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


def test_ranks_that_train_together_stand_still_with_a_node_and_go_on_with_it(tmp_path: Path):
    """Their collectives need what fails; /metrics says whom they wait for."""
    with network(2, tmp_path) as hosts:
        # Time enough for TCP, which waits ever longer before it sends again.
        job = start(hosts, tmp_path, lost_after_seconds=600, merge_deadline_seconds="120")
        job.begin()
        job.until_whole("a step of all ranks")

        hosts[1].cut()
        job.stands_still()
        root, other = job.metrics(0), job.metrics(1)
        assert root["run_active"] == root["rank_up{0}"] == root["rank_up{1}"] == 1
        assert other["rank_up{2}"] == other["rank_up{3}"] == 1
        assert root["step"] <= job.step(0)
        hosts[1].restore()
        job.goes_on(*range(4))
        back = job.until_whole("the node that is back")
        assert back["records_dropped_total{0}"] == 0

        hosts[1].pause()
        waiting = job.until(
            "the ranks that the others wait for",
            seconds=STANDING_SECONDS + BOUND_SECONDS,
            **{"lagging_rank_info{gone,2}": 1, "lagging_rank_info{gone,3}": 1},
        )
        assert waiting["run_active"] == 1
        # Of the other two one may have got what it needed for one more step.
        assert waiting["ranks_lagging"] in (2, 3)
        hosts[1].resume()
        job.goes_on(*range(4))
        job.until_whole("the node that goes on")

        last = job.finish()
        end = job.until("the end", run_active=0, steps_total=last)
        assert end["run_end_info{completed}"] == 1
