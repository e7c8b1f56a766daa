"""A run over two nodes, from real rings to the root's metrics; reports carried by hand."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from mp_agent.errors import ReportError
from mp_agent.node.conditions import tracker as conditions_tracker
from mp_agent.node.registry import RunSupervisor
from mp_agent.node.run.run import Run
from mp_agent.records.conditions import StoredConditionEvent
from mp_agent.records.schema import Share
from mp_agent.records.steps import EndReason
from mp_agent.ring import locations
from mp_agent.ring.run_files import read_conditions
from mp_agent.settings import Settings
from tests.agent.node.fake_rank import FakeRank
from tests.agent.node.scenarios.two_nodes import Node, Nodes
from tests.agent.node.shown import shown

DEADLINE_SECONDS = 20.0


@pytest.fixture
def nodes(tmp_path: Path, settings: Settings) -> Iterator[Nodes]:
    with ExitStack() as stack:
        pair = Nodes(*(Node(tmp_path, number, settings, stack) for number in range(2)))
        for node in (pair.root, pair.other):
            node.start_ranks()
            node.restart()
        yield pair


def test_the_root_shows_the_run_and_each_node_its_ranks(nodes: Nodes):
    nodes.root.steps(3, loss=1.0, compute_seconds=0.25, gradients={"sum_squares": 4.0})
    nodes.other.steps(3, loss=3.0, compute_seconds=0.5, gradients={"sum_squares": 4.0})
    nodes.push()

    values = shown(nodes.root.run)
    assert values["steps_total"] == 3
    assert values["loss"] == 2.0
    assert values["grad_norm"] == 2.0
    assert values["coverage_ratio"] == 1.0
    assert "rank_step{2}" not in values

    others = shown(nodes.other.run)
    assert others["rank_step{2}"] == 3
    assert "run_active" not in others
    assert nodes.root.run.is_root
    assert not nodes.other.run.is_root


def test_a_nonfinite_loss_is_blamed_on_its_rank_wherever_it_is(nodes: Nodes):
    nodes.root.steps()
    nodes.other.ranks[0].steps()
    nodes.other.ranks[1].steps(loss_nonfinite=1.0)
    nodes.push()

    assert shown(nodes.root.run)["first_nonfinite_info{1,3,,forward}"] == 1
    assert shown(nodes.other.run)["rank_loss_nonfinite_steps_total{3}"] == 1


def test_the_run_ends_when_the_ranks_of_both_nodes_have(nodes: Nodes):
    for node in (nodes.root, nodes.other):
        node.steps(2)
    nodes.push()
    for rank in nodes.root.ranks:
        rank.end(EndReason.COMPLETED)
    nodes.push(1.0)
    assert shown(nodes.root.run)["run_active"] == 1

    for rank in nodes.other.ranks:
        rank.kill()
    nodes.push(1.0)
    assert shown(nodes.root.run)["run_end_info{killed}"] == 1
    assert nodes.other.run.end is EndReason.KILLED


def test_a_node_that_falls_silent_costs_coverage_and_never_a_stall(nodes: Nodes):
    for node in (nodes.root, nodes.other):
        node.steps(2)
    nodes.push()
    nodes.root.steps(2)
    nodes.root.run.poll(1.0)
    assert shown(nodes.root.run)["steps_total"] == 2

    nodes.root.run.poll(1.0 + DEADLINE_SECONDS)
    values = shown(nodes.root.run)
    assert values["steps_total"] == 4
    assert values["coverage_ratio"] == 0.5
    assert values["missing_rank_info{2}"] == values["missing_rank_info{3}"] == 1
    assert values["grad_norm"] == 1.0, "replicas of what is missing are here"


def test_rows_that_come_after_the_end_do_not_lower_the_count_of_lost_ones(nodes: Nodes):
    for node in (nodes.root, nodes.other):
        node.steps(2)
    nodes.push()
    for node in (nodes.root, nodes.other):
        node.steps(3)
    for rank in nodes.root.ranks:
        rank.end(EndReason.COMPLETED)
    for now_seconds in (1.0, 1.0 + DEADLINE_SECONDS):
        nodes.root.run.poll(now_seconds)
    ended = shown(nodes.root.run)
    assert ended["run_end_info{unknown}"] == 1
    assert ended["records_dropped_total{0}"] == 2 * 3

    nodes.push(1.0 + DEADLINE_SECONDS)
    again = shown(nodes.root.run)
    assert again["run_active"] == 1, "the node was heard of again"
    assert again["records_dropped_total{0}"] >= ended["records_dropped_total{0}"]


def test_rows_that_are_still_to_come_when_the_ranks_of_the_root_end_are_not_lost(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(conditions_tracker, "PROCESSOR_SHARE", 1.0)  # judge after every step
    events: list[StoredConditionEvent] = []
    nodes.root.run.conditions.listeners.append(events.append)
    for node in (nodes.root, nodes.other):
        node.steps(3)
    nodes.push()
    nodes.root.steps(12)
    nodes.root.run.poll(5.0)
    nodes.other.steps(2)
    for rank in nodes.root.ranks:
        rank.end(EndReason.COMPLETED)
    nodes.push(6.0)

    assert shown(nodes.root.run)["records_dropped_total{0}"] == 0
    assert [event.condition.name for event in events] == []


def test_rows_that_have_not_come_when_the_next_attempt_begins_are_counted(nodes: Nodes):
    for node in (nodes.root, nodes.other):
        node.steps(5, tokens=7.0)
    nodes.push()
    for node in (nodes.root, nodes.other):
        node.steps(4, tokens=7.0)
    nodes.poll(1.0)
    for node in (nodes.root, nodes.other):
        for rank in node.ranks:
            rank.kill()
        node.start_ranks(attempt=1, created_unix_ns=9_000 + node.number)
    nodes.push(2.0)

    values = shown(nodes.root.run)
    assert values["steps_total"] == 9
    assert values["tokens_total"] == (2 * 9 + 2 * 5) * 7
    assert values["records_dropped_total{0}"] == 2 * 4


def test_restarts_of_both_agents_count_nothing_twice_and_lose_nothing(nodes: Nodes):
    for node in (nodes.root, nodes.other):
        node.steps(3, loss_nonfinite=1.0)
    nodes.push()
    nodes.root.run.commit()
    nodes.push(10.0)
    nodes.other.run.commit()
    for node in (nodes.root, nodes.other):
        node.steps(2, loss_nonfinite=1.0)
    nodes.push(20.0)
    nodes.other.run.commit()
    assert shown(nodes.root.run)["steps_total"] == 5

    nodes.other.restart()
    nodes.root.restart()
    assert shown(nodes.root.run)["steps_total"] == 3, "what the ledger says"
    nodes.push()
    nodes.push(10.0)
    values = shown(nodes.root.run)
    assert values["steps_total"] == 5
    assert values["loss_nonfinite_steps_total"] == 5
    assert values["coverage_ratio"] == 1.0
    assert values["records_dropped_total{0}"] == 0
    assert shown(nodes.other.run)["rank_loss_nonfinite_steps_total{3}"] == 5


def test_the_root_alone_restarts_and_is_sent_again_what_it_had_not_committed(nodes: Nodes):
    for node in (nodes.root, nodes.other):
        node.steps(3)
    nodes.push()
    assert shown(nodes.root.run)["steps_total"] == 3

    nodes.root.restart()
    nodes.other.steps(1)
    nodes.root.steps(1)
    nodes.push(10.0)
    nodes.push(20.0)
    values = shown(nodes.root.run)
    assert values["steps_total"] == 4
    assert values["coverage_ratio"] == 1.0


def test_rows_are_settled_once_they_are_in_the_roots_ledger(nodes: Nodes):
    for node in (nodes.root, nodes.other):
        node.steps(3)
    nodes.push()

    def settled(now_seconds: float) -> int:
        nodes.poll(now_seconds)
        report = nodes.other.run.next_report()
        assert report is not None
        return nodes.root.run.receive(report).settled

    assert settled(10.0) == 0
    nodes.root.run.commit()
    assert settled(20.0) == 3


def test_the_next_attempt_of_all_nodes_is_another_run_of_steps(nodes: Nodes):
    for node in (nodes.root, nodes.other):
        node.steps(3)
    nodes.push()
    session = nodes.other.run.session
    for node in (nodes.root, nodes.other):
        for rank in node.ranks:
            rank.kill()
    nodes.other.run.url = "http://b:2"
    nodes.poll(5.0)
    stale = nodes.other.run.next_report()
    assert stale is not None
    for number, node in enumerate((nodes.root, nodes.other)):
        node.start_ranks(attempt=1, created_unix_ns=9_000 + number)
        node.steps(2)
    nodes.poll(10.0)
    assert nodes.other.run.session != session
    assert nodes.other.run.url == "http://b:2"
    nodes.root.run.receive(stale)
    nodes.push(10.0)

    values = shown(nodes.root.run)
    assert values["steps_total"] == 5
    assert values["step"] == 2
    assert values["coverage_ratio"] == 1.0
    assert values["run_active"] == 1


def test_a_report_that_was_long_on_its_way_does_not_count_in_a_later_attempt(nodes: Nodes):
    for node in (nodes.root, nodes.other):
        node.steps(3, tokens=7.0)
    nodes.poll(0.0)
    stale = nodes.other.run.next_report()
    assert stale is not None
    nodes.other.run.acknowledge(nodes.root.run.receive(stale))
    nodes.root.run.poll(0.0)
    for attempt in (1, 2):
        for node in (nodes.root, nodes.other):
            for rank in node.ranks:
                rank.kill()
        nodes.push(10.0 * attempt)
        for node in (nodes.root, nodes.other):
            node.start_ranks(attempt=attempt, created_unix_ns=9_000 * attempt + node.number)
    nodes.root.restart()
    nodes.root.run.receive(stale)
    for node in (nodes.root, nodes.other):
        node.steps(2, tokens=7.0)
    nodes.push(21.0)

    values = shown(nodes.root.run)
    assert values["steps_total"] == 5
    assert values["tokens_total"] == 4 * 5 * 7
    assert values["records_dropped_total{0}"] == 0


def test_a_node_that_begins_the_next_attempt_before_the_root_takes_part_in_it(nodes: Nodes):
    """Where `root` is set, no request says that its reports are of the next one."""
    for node in (nodes.root, nodes.other):
        node.steps(3)
    nodes.push()
    for number, node in enumerate((nodes.other, nodes.root)):
        for rank in node.ranks:
            rank.kill()
        node.start_ranks(attempt=1, created_unix_ns=9_000 + number)
        node.steps(2)
        nodes.push((number + 1) * (DEADLINE_SECONDS + 1.0))
    last_seconds = 2 * (DEADLINE_SECONDS + 1.0)
    for node in (nodes.root, nodes.other):
        node.steps(3)
    nodes.push(last_seconds + DEADLINE_SECONDS)
    nodes.push(last_seconds + DEADLINE_SECONDS + 1.0)

    values = shown(nodes.root.run)
    assert values["step"] == 5
    assert values["coverage_ratio"] == 1.0
    assert not any(name.startswith("missing_rank_info") for name in values)


def test_layers_that_every_rank_has_are_not_sent(nodes: Nodes):
    for node in (nodes.root, nodes.other):
        node.steps()
        for rank in node.ranks:
            rank.layer_table(sum_squares=9.0)
    nodes.poll()
    report = nodes.other.run.next_report()
    assert report is not None
    assert report.layers == ()

    nodes.root.run.receive(report)
    nodes.root.run.poll(0.0)
    assert shown(nodes.root.run)["layer_grad_norm{weight}"] == 3.0


@pytest.mark.parametrize(
    ("share_of", "label", "norm"),
    [
        (lambda rank: Share(group="fsdp", shard_index=rank, shard_count=4), "weight", 6.0),
        (
            lambda rank: Share(
                group=f"stage{rank // 2}",
                replica_index=rank % 2,
                replica_count=2,
                home="2-3" if rank > 1 else "0-1",
            ),
            "weight@2-3",
            3.0,
        ),
    ],
)
def test_layers_that_the_root_does_not_hold_itself_are(
    tmp_path: Path, settings: Settings, share_of: Callable[[int], Share], label: str, norm: float
):
    with ExitStack() as stack:
        pair = Nodes(*(Node(tmp_path, number, settings, stack) for number in range(2)))
        for node in (pair.root, pair.other):
            node.start_ranks(share_of)
            node.restart()
            node.steps()
            for rank in node.ranks:
                rank.layer_table(sum_squares=9.0)
        pair.push()

        assert shown(pair.root.run)[f"layer_grad_norm{{{label}}}"] == norm


def test_a_report_of_another_run_is_refused(nodes: Nodes):
    nodes.other.steps()
    nodes.poll()
    report = nodes.other.run.next_report()
    assert report is not None

    with pytest.raises(ReportError, match="run 'llama', not of 'other'"):
        Run.receive(_Renamed(), report)  # type: ignore[arg-type]


class _Renamed:
    name = "other"


def test_between_two_reports_a_node_is_quiet_unless_something_ends(nodes: Nodes):
    nodes.other.steps()
    assert nodes.push() == 1
    nodes.other.steps()
    assert nodes.push(1.0) == 0
    assert nodes.push(3.0) == 1, "half of the push interval has passed"

    nodes.other.ranks[0].end(EndReason.FAILED)
    assert nodes.push(3.1) == 1


def test_the_roster_has_the_nodes_with_their_urls(nodes: Nodes):
    nodes.root.run.url, nodes.other.run.url = "http://a:1", "http://b:2"
    nodes.push()

    known = nodes.root.run.nodes
    assert [(node.node_rank, node.host, node.url) for node in known] == [
        (0, "host0", "http://a:1"),
        (1, "host1", "http://b:2"),
    ]
    assert [node.url for node in nodes.other.run.nodes] == ["http://b:2"]


def test_what_the_root_finds_reaches_the_ranks_of_the_other_node(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(conditions_tracker, "PROCESSOR_SHARE", 1.0)
    for node in (nodes.root, nodes.other):
        node.steps(5)
        node.steps(2, gradients={"sum_squares": 1e8})
    nodes.push(1.0)
    assert read_conditions(nodes.other.run_dir) is None, "the root had judged nothing yet"
    found = read_conditions(nodes.root.run_dir)
    assert found is not None
    assert [event.condition.name for event in found.after(0)] == ["MpAgentGradientExplosion"]

    for node in (nodes.root, nodes.other):
        node.steps()
    nodes.push(10.0)
    assert read_conditions(nodes.other.run_dir) == found


def test_nodes_need_not_have_equally_many_ranks(tmp_path: Path, settings: Settings):
    with ExitStack() as stack:
        pair = Nodes(*(Node(tmp_path, number, settings, stack) for number in range(2)))
        for node, ranks in ((pair.root, [0]), (pair.other, [1, 2, 3])):
            place: dict[str, Any] = {
                "world_size": 4,
                "local_world_size": len(ranks),
                "node_rank": node.number,
            }
            node.ranks = [
                stack.enter_context(FakeRank(node.run_dir, rank, local_rank=index, **place))
                for index, rank in enumerate(ranks)
            ]
            node.restart()
            node.steps()
        pair.push()

        values = shown(pair.root.run)
        assert values["coverage_ratio"] == 1.0
        (info,) = (name for name in values if name.startswith("run_info{"))
        assert ",4,2," in info, "world size and nodes"


def supervised_root(nodes: Nodes) -> RunSupervisor:
    lock_fd = locations.hold_agent_lock(nodes.root.run_dir)
    assert lock_fd is not None
    watch = RunSupervisor(
        nodes.root.run_dir, lock_fd, nodes.root.settings, setting_errors=0, now_seconds=0.0
    )
    nodes.root.run = watch.run
    return watch


def test_a_root_that_is_always_slow_does_not_wait_for_ever(nodes: Nodes):
    watch = supervised_root(nodes)
    watch.poll(0.0)
    nodes.push()
    nodes.root.steps()
    for polls in range(1, 10):
        watch.poll(polls * DEADLINE_SECONDS)
    assert shown(watch.run)["steps_total"] == 1
    watch.release()


def test_a_root_that_was_stopped_waits_for_reports_it_did_not_get(nodes: Nodes):
    watch = supervised_root(nodes)
    for node in (nodes.root, nodes.other):
        node.steps()
    watch.poll(0.0)
    nodes.push()
    for node in (nodes.root, nodes.other):
        node.steps()
    watch.poll(0.3)
    for node in (nodes.root, nodes.other):
        node.steps(30)
    now_seconds = 0.3 + 10 * DEADLINE_SECONDS
    watch.poll(now_seconds)
    assert shown(watch.run)["steps_total"] == 1
    assert shown(watch.run)["coverage_ratio"] == 1.0

    nodes.push(now_seconds)
    values = shown(watch.run)
    assert values["steps_total"] == 32
    assert values["coverage_ratio"] == 1.0
    assert values["records_dropped_total{0}"] == 0
    watch.release()
