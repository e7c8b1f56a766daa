"""Two node agents in their own processes, with a proxy between them that harms their pushes."""

import signal
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from mp_agent.records.steps import EndReason
from mp_agent.ring import locations
from mp_agent.settings import Settings
from tests.agent.node.agent_process import scrape, start_agent, wait_for_status
from tests.agent.node.fake_rank import FakeRank
from tests.agent.node.lossy_proxy import GOOD, LossyProxy
from tests.waiting import wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.long]

TOKENS = 7.0
PER_ROUND = 5
ROUNDS = 6


class TwoAgents:
    """A run of two nodes of two ranks; the second node's agent reaches the root by the proxy."""

    def __init__(self, base: Path, proxy: LossyProxy, settings: Settings, stack: ExitStack) -> None:
        self.proxy = proxy
        self._ranks: list[list[FakeRank]] = []
        self._run_dirs = []
        self._agents = []
        changes = {"root": proxy.url, "token": "secret", "push_interval_seconds": 0.2}
        for number in range(2):
            directory = base / f"node{number}"
            run_dir = locations.run_directory(directory, "llama")
            self._ranks.append(
                [
                    stack.enter_context(
                        FakeRank(
                            run_dir,
                            2 * number + local,
                            world_size=4,
                            local_rank=local,
                            local_world_size=2,
                            node_rank=number,
                            host=f"host{number}",
                            launch=f"launcher{number}",
                        )
                    )
                    for local in range(2)
                ]
            )
            own: dict[str, Any] = {
                **dict(settings),
                **changes,
                "dir": directory,
                "merge_deadline_seconds": 3.0,
            }
            agent = start_agent(Settings(**own), "--run-dir", run_dir)
            stack.callback(agent.wait)
            stack.callback(agent.kill)
            self._agents.append(agent)
            self._run_dirs.append(run_dir)
        proxy.root_url = wait_until(
            lambda: wait_for_status(self._run_dirs[0]).url, what="the root's address"
        )

    def shown(self) -> Mapping[str, float]:
        return scrape(wait_for_status(self._run_dirs[0]))

    def train(self) -> None:
        """Let all ranks make some steps, and one push at least be tried."""
        met = self.proxy.met.total()
        for ranks in self._ranks:
            for rank in ranks:
                rank.steps(PER_ROUND, tokens=TOKENS)
        wait_until(lambda: self.proxy.met.total() > met, what="a push")

    def end(self, *, nodes: int = 2) -> None:
        for ranks in self._ranks[:nodes]:
            for rank in ranks:
                rank.end(EndReason.COMPLETED)

    def kill_second_node(self) -> None:
        """Kill its agent and its ranks at once."""
        self._agents[1].send_signal(signal.SIGKILL)
        for rank in self._ranks[1]:
            rank.kill()

    def until_end(self) -> Mapping[str, float]:
        """Return what the root shows as soon as it shows the end."""

        def ended() -> Mapping[str, float] | None:
            shown = self.shown()
            return shown if shown["run_active"] == 0 else None

        return wait_until(ended, what="the end of the run")


@pytest.fixture
def agents(tmp_path: Path, settings: Settings) -> Iterator[TwoAgents]:
    with ExitStack() as stack:
        proxy = stack.enter_context(LossyProxy(seed=1))
        yield TwoAgents(tmp_path, proxy, settings, stack)


def test_the_last_rows_come_through_a_proxy_that_loses_repeats_and_damages(agents: TwoAgents):
    for _ in range(ROUNDS):
        agents.train()
    agents.proxy.hangs.set()
    agents.end()
    wait_until(lambda: agents.proxy.held, what="a push that hangs")
    assert agents.shown()["run_active"] == 1
    agents.proxy.hangs.clear()
    shown = agents.until_end()
    assert len(agents.proxy.met) > 1, "nothing was harmed"
    assert shown["run_end_info{completed}"] == 1
    assert shown["steps_total"] == ROUNDS * PER_ROUND
    assert shown["tokens_total"] == 4 * ROUNDS * PER_ROUND * TOKENS
    assert shown["records_dropped_total{0}"] == 0


@pytest.mark.parametrize("killed", [False, True])
def test_an_end_without_the_last_rows_of_a_node_counts_them(agents: TwoAgents, killed: bool):
    agents.proxy.fates = (GOOD,)
    agents.train()
    wait_until(lambda: agents.shown()["steps_total"] == PER_ROUND, what="the first steps")
    agents.proxy.fates = ("lost",)
    agents.train()
    if killed:
        agents.kill_second_node()
    agents.end(nodes=1 if killed else 2)
    shown = agents.until_end()
    assert shown["run_end_info{unknown}"] == 1
    assert shown["steps_total"] == 2 * PER_ROUND
    assert shown["tokens_total"] == (4 + 2) * PER_ROUND * TOKENS
    assert shown["records_dropped_total{0}"] == 2 * PER_ROUND
