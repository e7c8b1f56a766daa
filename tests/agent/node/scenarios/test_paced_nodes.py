"""Rows of nodes that push seldom, because their root asked for it: nothing is missed or lost."""

import asyncio
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from pydantic import SecretStr

from mp_agent.node.accounting.ranks import STANDING_SECONDS
from mp_agent.node.transport.pace import LONGEST_SECONDS
from mp_agent.node.transport.service import PushService
from mp_agent.settings import Settings
from tests.agent.node.scenarios.two_nodes import Node, Nodes
from tests.agent.node.shown import MERGE_DEADLINE_SECONDS, shown
from tests.agent.node.transport.stubs import serving

USUAL_SECONDS = 5.0
TOKEN = "secret"


@pytest.fixture
def nodes(tmp_path: Path, settings: Settings) -> Iterator[Nodes]:
    with ExitStack() as stack:
        pair = Nodes(*(Node(tmp_path, number, settings, stack) for number in range(2)))
        for node in (pair.root, pair.other):
            node.start_ranks()
            node.restart()
        yield pair


def test_deadlines_follow_the_pace_and_so_does_who_is_silent(nodes: Nodes):
    nodes.root.run.follow_pace(LONGEST_SECONDS)
    for node in (nodes.root, nodes.other):
        node.steps(1)
    nodes.push(100.0)
    nodes.root.steps(1)
    deadline_seconds = MERGE_DEADLINE_SECONDS + 2 * LONGEST_SECONDS
    nodes.root.run.poll(100.0)
    nodes.root.run.poll(99.0 + deadline_seconds)
    assert shown(nodes.root.run)["steps_total"] == 1

    nodes.root.run.poll(100.0 + deadline_seconds)
    values = shown(nodes.root.run)
    assert values["steps_total"] == 2
    assert values["coverage_ratio"] == 0.5


def test_a_pace_that_the_root_chose_is_no_standstill(nodes: Nodes):
    for node in (nodes.root, nodes.other):
        node.steps(1)
    nodes.push(100.0)

    def standing_seconds(now_seconds: float) -> float | None:
        view = nodes.root.run.export(now_seconds, 1_000.0).view
        return None if view is None else view.standing_seconds

    assert standing_seconds(120.0) == 20.0
    nodes.root.run.follow_pace(LONGEST_SECONDS)
    assert standing_seconds(120.0) == 0.0
    assert standing_seconds(200.0) == 100.0 - (LONGEST_SECONDS - USUAL_SECONDS)


def test_no_rank_lags_for_a_pace_that_the_root_chose(nodes: Nodes):
    for node in (nodes.root, nodes.other):
        node.steps(1)
    nodes.root.steps(1)
    nodes.push(100.0)

    assert laggards(nodes, STANDING_SECONDS) == [2, 3]
    nodes.root.run.follow_pace(LONGEST_SECONDS)
    assert laggards(nodes, STANDING_SECONDS) == []
    assert laggards(nodes, STANDING_SECONDS + LONGEST_SECONDS) == [2, 3]


@pytest.mark.parametrize("set_by_seconds", [-3600.0, 3600.0])
def test_a_clock_that_is_set_neither_makes_laggards_nor_hides_them(
    nodes: Nodes, set_by_seconds: float
):
    for node in (nodes.root, nodes.other):
        node.steps(1)
    nodes.root.steps(1)
    nodes.push(100.0)
    assert laggards(nodes, 1.0, set_by_seconds) == []
    assert laggards(nodes, STANDING_SECONDS, set_by_seconds) == [2, 3]


def laggards(nodes: Nodes, age_seconds: float, set_by_seconds: float = 0.0) -> list[int]:
    """Return who lags so long after the last push; the wall clock was set in between."""
    view = nodes.root.run.export(100.0, 0.0).view
    assert view is not None and view.latest.step is not None
    now_unix_seconds = view.latest.step.time_unix_seconds + age_seconds + set_by_seconds
    view = nodes.root.run.export(100.0 + age_seconds, now_unix_seconds).view
    return [] if view is None else [laggard.rank for laggard in view.laggards]


def test_fast_steps_bound_the_pace_so_that_none_closes_for_lack_of_room(nodes: Nodes):
    for second in range(12):
        for node in (nodes.root, nodes.other):
            node.steps(50)
        nodes.push(float(second))
    member = nodes.root.run._state.member
    assert member._root is not None
    open_at_most = member._root.steps.pending_at_most
    assert nodes.root.run.longest_pace_seconds == pytest.approx(open_at_most / 50 / 3, rel=0.2)


def test_steps_that_were_made_before_the_root_began_do_not_bound_the_pace(nodes: Nodes):
    nodes.root.steps(400)
    for second in range(24):
        for node in (nodes.root, nodes.other):
            node.steps(1)
        nodes.push(float(second))
    member = nodes.root.run._state.member
    assert member._root is not None
    open_at_most = member._root.steps.pending_at_most
    assert nodes.root.run.longest_pace_seconds == pytest.approx(open_at_most / 3, rel=0.2)


def test_a_report_that_was_put_off_is_not_followed_by_another_at_once(nodes: Nodes):
    """Else each would be put off in its turn, and a root that is busy once would stay so."""
    run = nodes.other.run
    nodes.other.steps(1)
    run.poll(100.0)
    put_off = run.next_report()
    assert put_off is not None
    nodes.other.steps(1)
    run.poll(120.0)
    run.acknowledge(nodes.root.run.receive(put_off))
    assert run.next_report() is None

    nodes.other.ranks[0].steps(loss_nonfinite=1.0)
    nodes.other.ranks[1].steps()
    run.poll(120.5)
    assert run.urgent
    assert run.next_report() is not None, "trouble does not wait"

    nodes.other.steps(1)
    run.poll(120.5 + USUAL_SECONDS)
    assert run.next_report() is not None


def test_the_first_that_was_not_finite_is_named_although_it_arrives_last(
    nodes: Nodes, settings: Settings
):
    """Over HTTP, with the root's turns used up: the push with the true first is put off."""
    nodes.root.steps(5)
    nodes.root.ranks[1].steps(loss_nonfinite=1.0)
    nodes.root.ranks[0].steps()
    nodes.other.steps(2)
    nodes.other.ranks[0].steps()
    nodes.other.ranks[1].steps(loss_nonfinite=1.0)
    nodes.other.steps(3)

    async def meet() -> int:
        own = settings.model_copy(update={"token": SecretStr(TOKEN), "root_core_share": 0.25e-3})
        root = PushService(own, lambda: [nodes.root.run], lambda: endpoint)
        async with serving(root.routes()) as endpoint:
            there = own.model_copy(update={"root": endpoint.url})
            other = PushService(there, lambda: [nodes.other.run], lambda: None)
            while not root._pace.put_off_seconds("", time.monotonic(), urgent=True):
                pass
            while shown(nodes.root.run).get("steps_total", 0.0) < 6:
                for node, service in ((nodes.other, other), (nodes.root, root)):
                    node.run.poll(time.monotonic())
                    service.tick(time.monotonic())
                await asyncio.sleep(0.02)
            put_off = other.link(nodes.other.run).view.pushes_put_off
            for service in (other, root):
                await service.stop(time.monotonic())
            return put_off

    assert asyncio.run(asyncio.wait_for(meet(), 120)) >= 1
    values = shown(nodes.root.run)
    assert values["first_nonfinite_info{3,3,,forward}"] == 1
    assert values["coverage_ratio"] == 1.0
    dropped = [value for key, value in values.items() if key.startswith("records_dropped_total")]
    assert dropped == [0.0]
