"""Node agents die and hang under a job whose ranks train together, on clocks that disagree."""

import re
import signal
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.hosts.failures import BOUND_SECONDS, RUN, is_recent, kill_agent, rank_pid, start
from tests.hosts.network import network

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.long]

RANKS = range(6)


def waits_for(late: int, other: int, metrics: Mapping[str, float]) -> bool:
    """Return whether a rank that is up has made no step that another one has yet to make."""
    behind = metrics[f"rank_step{{{late}}}"] <= metrics[f"rank_step{{{other}}}"]
    return behind and metrics[f"rank_up{{{late}}}"] == 1


def test_node_agents_that_die_and_hang_under_skewed_clocks(tmp_path: Path):
    with network(3, tmp_path) as hosts:
        hosts[1].clock_skew_seconds, hosts[2].clock_skew_seconds = 3600.0, -3600.0
        job = start(hosts, tmp_path)
        job.begin()
        first = job.until_whole("a step of all ranks")
        assert is_recent(first["last_step_timestamp_seconds"])
        ahead = job.metrics(1)["rank_last_step_timestamp_seconds{2}"]
        assert not is_recent(ahead)
        assert is_recent(ahead - 3600)

        # The agent of another node: a new one takes over, and the root is sent everything again.
        killed = kill_agent(hosts[1])
        job.job.until(
            lambda: (a := hosts[1].agent(RUN)) and a.pid != killed,
            "another agent",
            seconds=BOUND_SECONDS,
        )
        job.goes_on(*RANKS)
        job.until_whole("the rows of the new agent")

        # The root agent: so too, on the same port, with its counters.
        before = job.metrics()
        port = hosts[0].wait_for_agent(RUN).port
        killed = kill_agent(hosts[0])
        job.job.until(
            lambda: (a := hosts[0].agent(RUN)) and a.pid != killed,
            "another root agent",
            seconds=BOUND_SECONDS,
        )
        assert hosts[0].wait_for_agent(RUN).port == port
        job.goes_on(*RANKS)
        after = job.until_whole("the rows of all nodes at the new root agent")
        assert after["steps_total"] >= before["steps_total"]
        assert after["nodes_known{0}"] == 3

        # Once more, and another process takes its port meanwhile: the other nodes are notified.
        killed = kill_agent(hosts[0])
        with hosts[0].port_taken(port):
            job.job.until(
                lambda: (a := hosts[0].agent(RUN)) and a.pid != killed,
                "a root agent on another port",
                seconds=BOUND_SECONDS,
            )
        assert hosts[0].wait_for_agent(RUN).port != port
        moved = job.until_whole("the rows of all nodes at the other port")
        assert moved["nodes_known{0}"] == 3
        assert moved["steps_total"] >= after["steps_total"]

        # An agent that hangs: its ranks are missing, training does not notice.
        hung = hosts[2].wait_for_agent(RUN).pid
        hosts[2].signal(hung, signal.SIGSTOP)
        without = job.until("the silence of a node", coverage_ratio=4 / 6, missing=2)
        assert {"missing_rank_info{4}", "missing_rank_info{5}"} <= set(without)
        assert without["run_active"] == 1
        job.goes_on(*RANKS)
        hosts[2].signal(hung, signal.SIGCONT)
        job.until_whole("the node that is back")

        # The root agent hangs: the others serve their own ranks.
        hung = hosts[0].wait_for_agent(RUN).pid
        hosts[0].signal(hung, signal.SIGSTOP)
        served = job.metrics(1)["rank_step{2}"]
        job.goes_on(*RANKS)
        job.until("steps of its own ranks", 1, **{"rank_up{2}": 1})
        assert job.metrics(1)["rank_step{2}"] > served
        hosts[0].signal(hung, signal.SIGCONT)
        job.until_whole("all ranks at the root that is back")

        # A rank hangs: the others wait for it, and everybody can see for whom.
        pid = rank_pid(hosts[1], 1)
        hosts[1].signal(pid, signal.SIGSTOP)
        job.stands_still()
        job.job.until(lambda: waits_for(3, 2, job.metrics(1)), "rank 2 to be seen to wait for it")
        assert job.metrics()["run_active"] == 1
        hosts[1].signal(pid, signal.SIGCONT)
        job.goes_on(*RANKS)

        last = job.finish()
        end = job.until("the end", run_active=0, steps_total=last)
        assert end["step"] == last
        assert end["run_end_info{completed}"] == 1
        (norm,) = re.findall(rf"^norm {last} (\S+)$", job.job.log(), re.M)
        assert end["grad_norm"] == pytest.approx(float(norm), rel=1e-6)
