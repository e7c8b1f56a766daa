"""How often nodes push is up to the root: by what it costs, and never at the cost of rows."""

from collections.abc import Iterator
from math import inf

import pytest

from mp_agent.node.transport.pace import BURST_REQUESTS_MIN, LONGEST_SECONDS, Load, PushPace

SHORTEST, SHARE = 5.0, 0.25


class SimulatedRoot:
    """A root whose requests and steps cost so much processor time, by a clock of its own."""

    def __init__(self, nodes: int, *, request_seconds: float, own_share: float = 0.0) -> None:
        self.pace = PushPace(SHORTEST, SHARE)
        self.nodes = nodes
        self.now_seconds = 0.0
        self._load = Load()
        self._request_seconds = request_seconds
        self._own_share = own_share

    def work(self, seconds: float, *, limit_seconds: float = inf) -> float:
        """Serve all nodes at the pace for so long; return the share of a core that it took."""
        before, end_seconds = self._load, self.now_seconds + seconds
        while self.now_seconds < end_seconds:
            self.pace.tick(self.now_seconds, self._load, self.nodes, limit_seconds=limit_seconds)
            requests = round(self.nodes / self.pace.asked_seconds)
            self._load = Load(
                self._load.processor_seconds + requests * self._request_seconds + self._own_share,
                self._load.own_seconds + self._own_share,
                self._load.requests + requests,
            )
            self.now_seconds += 1.0
        return (self._load.processor_seconds - before.processor_seconds) / seconds


@pytest.mark.parametrize(
    ("nodes", "request_seconds", "own_share"),
    [(1250, 0.5e-3, 0.02), (4000, 0.5e-3, 0.05), (12_500, 0.3e-3, 0.1), (12_500, 0.2e-3, 0.0)],
)
def test_the_root_keeps_to_its_share_of_a_core(nodes, request_seconds, own_share):
    root = SimulatedRoot(nodes, request_seconds=request_seconds, own_share=own_share)
    root.work(300)
    assert root.work(100) <= SHARE * 1.12


def test_few_nodes_keep_the_pace_of_the_settings():
    root = SimulatedRoot(64, request_seconds=1e-3)
    root.work(300)
    assert root.pace.asked_seconds == SHORTEST


@pytest.mark.parametrize("nodes", [20, 50, 80, 99, 400])
def test_a_busy_minute_lengthens_the_pace_for_a_while_only(nodes):
    pace, load = PushPace(SHORTEST, SHARE), Load()
    for second in range(3600):
        requests = nodes / pace.asked_seconds
        seconds = 1.0 if 60 <= second < 120 else requests * 0.5e-3
        load = Load(load.processor_seconds + seconds, 0.0, load.requests + round(requests))
        pace.tick(float(second), load, nodes)
    assert pace.asked_seconds == pytest.approx(SHORTEST, rel=0.1)


def test_a_pace_does_not_swing():
    root = SimulatedRoot(4000, request_seconds=0.6e-3, own_share=0.05)
    root.work(300)
    seen = {root.work(1) and root.pace.asked_seconds for _ in range(200)}
    assert len(seen) == 1


def test_no_pace_is_longer_than_a_connection_lives_however_little_the_root_manages():
    root = SimulatedRoot(12_500, request_seconds=5e-3, own_share=0.9)
    root.work(300)
    assert root.pace.asked_seconds == LONGEST_SECONDS


def test_steps_that_cannot_be_kept_open_so_long_shorten_the_pace():
    root = SimulatedRoot(12_500, request_seconds=0.5e-3)
    root.work(100)
    before = root.pace.asked_seconds
    root.work(1, limit_seconds=7.0)
    assert before > 7.0 == root.pace.asked_seconds


def test_the_pace_before_is_allowed_until_each_node_has_pushed_again():
    pace = PushPace(SHORTEST, SHARE)
    pace.tick(0.0, Load(), 12_500)
    before_seconds = pace.asked_seconds
    pace.tick(100.0, Load(), 8)
    assert pace.asked_seconds == SHORTEST
    assert pace.allowed_seconds(100.0) == before_seconds
    assert pace.allowed_seconds(99.9 + before_seconds) == before_seconds
    assert pace.allowed_seconds(100.1 + before_seconds) == SHORTEST


def returns(pace: PushPace, requests: int, *, urgent: bool = True) -> Iterator[tuple[float, int]]:
    """Yield, of requests that all come in one second, when each is accepted, and after how often.

    Each comes back when it was asked to.
    """
    waiting = sorted((number / requests, number, 0) for number in range(requests))
    while waiting:
        now_seconds, number, times = waiting.pop(0)
        seconds = pace.put_off_seconds(number, now_seconds, urgent=urgent)
        if not seconds:
            yield now_seconds, times
            continue
        waiting.append((now_seconds + seconds, number, times + 1))
        waiting.sort()


def test_a_storm_is_spread_and_every_node_gets_its_turn():
    pace = PushPace(SHORTEST, SHARE)
    accepted = list(returns(pace, 12_500))
    assert len(accepted) == 12_500
    in_a_second = [sum(s <= at < s + 1 for at, _ in accepted) for s in range(1, 30)]
    assert sum(at < 1 for at, _ in accepted) > max(in_a_second)
    assert max(in_a_second) <= 2 * SHARE / 0.5e-3 * 1.2
    assert max(times for _, times in accepted) == 1
    assert max(at for at, _ in accepted) < LONGEST_SECONDS


def test_a_node_that_was_put_off_is_not_missed_meanwhile():
    pace = PushPace(SHORTEST, SHARE)
    waits = [pace.put_off_seconds(node, 0.0, urgent=True) for node in range(12_500)]
    assert pace.allowed_seconds(max(waits) - 1.0) >= SHORTEST + max(waits)
    assert pace.allowed_seconds(max(waits) + 1.0) == SHORTEST


def test_a_small_run_is_never_put_off():
    pace = PushPace(SHORTEST, 0.01)
    waits = [pace.put_off_seconds(node, 0.0, urgent=True) for node in range(BURST_REQUESTS_MIN)]
    assert not any(waits)


def test_a_root_beyond_its_share_accepts_the_pushes_of_its_pace():
    root = SimulatedRoot(12_500, request_seconds=3e-3)
    root.work(300)
    apart_seconds = LONGEST_SECONDS / root.nodes
    waits = [
        root.pace.put_off_seconds(number, root.now_seconds + number * apart_seconds, urgent=False)
        for number in range(4 * root.nodes)
    ]
    assert not any(waits)


def test_trouble_goes_before_the_usual():
    pace = PushPace(SHORTEST, SHARE)
    usual = 0
    while not pace.put_off_seconds(0, 0.0, urgent=False):
        usual += 1
    assert not any(pace.put_off_seconds(node, 0.0, urgent=True) for node in range(usual // 2))


def test_nodes_that_come_back_late_are_not_put_off_again():
    """12 500 agents begin within a second, and look at the clock every four seconds."""
    pace = PushPace(SHORTEST, SHARE)
    nodes, look_seconds = 12_500, 4
    due = [0.0] * nodes
    times = [0] * nodes
    put_off_at: list[int] = []
    for second in range(200):
        pace.tick(second, Load(), nodes)
        for node in range(nodes) if not second else range(second % look_seconds, nodes, 4):
            if due[node] > second:
                continue
            wait_seconds = pace.put_off_seconds(node, second, urgent=False)
            times[node] = times[node] + 1 if wait_seconds else 0
            put_off_at += [second] * bool(wait_seconds)
            assert times[node] <= 1
            due[node] = second + (wait_seconds or pace.asked_seconds)
    assert put_off_at
    assert max(put_off_at) < 60
