"""The root merges what nodes report, whatever is lost, late, repeated or restarted on the way."""

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from mp_agent.errors import ReportError
from mp_agent.node.cluster.reports import STEPS_KEPT
from mp_agent.node.cluster.root import AHEAD_AT_MOST, FIRST_REPORT_SECONDS, MergedTable
from mp_agent.node.merge.node_steps import RankStep
from mp_agent.records.columns import GRADIENTS
from mp_agent.records.global_statistics import GlobalStatistics
from mp_agent.records.merged import MergedStep
from mp_agent.records.schema import Share
from mp_agent.records.steps import EndReason
from tests.agent.node.builders import gradient_row, make_record, rank_layers, rank_step
from tests.agent.node.fleet import SimNode, make_root, push, steps_of
from tests.agent.node.placements import placements, spread

DEADLINE_SECONDS = 20.0
GRACE_SECONDS = 10.0


def ddp_step(world_size: int, **values: float):
    def write(rank: int, sequence: int) -> RankStep:
        share = Share(group="ddp", replica_index=rank, replica_count=world_size)
        row = gradient_row(sum_squares=float(sequence) ** 2, elements=4.0)
        return rank_step(rank, make_record(sequence, {"loss": rank + 1.0, **values}, [row]), share)

    return write


def two_nodes(**options: object) -> tuple[SimNode, SimNode]:
    """Return the root's own node and another one, of two ranks each."""
    return (
        SimNode(0, [0, 1], 4, ddp_step(4)),
        SimNode(1, [2, 3], 4, ddp_step(4), **options),  # type: ignore[arg-type]
    )


def closed(root, now_seconds: float = 0.0) -> list[MergedStep]:
    return steps_of(root.close_ready(now_seconds))


def test_a_step_closes_when_every_node_has_delivered_it():
    own, other = two_nodes()
    root = make_root(4)
    for node in (own, other):
        node.write()
    push(root, own)
    assert closed(root) == []

    push(root, other)
    (step,) = closed(root)
    assert step.coverage == 1.0
    assert step.get("loss") == 2.5
    assert step.gradients_complete
    assert step.grad_norm == 1.0


def test_the_names_of_columns_are_kept_once_for_all_nodes():
    """They were a third of what a root of 12 500 nodes took."""
    world_size = 20
    nodes = [SimNode(n, [2 * n, 2 * n + 1], world_size, ddp_step(world_size)) for n in range(10)]
    root = make_root(world_size)
    for _ in range(2):
        for node in nodes:
            node.write()
            push(root, node)
    known = [root.nodes.get(number) for number in range(10)]
    kept = [node.form[0] for node in known if node is not None and node.form is not None]
    assert len(kept) == 10
    assert len(kept[0].step_columns) > 0
    assert len({id(columns.step_columns) for columns in kept}) == 1
    assert len({id(columns.families) for columns in kept}) == 1
    assert all(node is not None and node.report.step_columns == () for node in known)


def test_column_names_that_change_with_every_report_do_not_pile_up():
    own, other = two_nodes()
    root = make_root(4)
    for number in range(200):
        for node in (own, other):
            node.write()
        push(root, own)
        report = other.report()
        more = (*report.step_columns, f"unknown{number}")
        other.acknowledge(root.receive(replace(report, step_columns=more), 0.0, 5_000.0))
        (step,) = closed(root)
        assert step.get("loss") == 2.5
    assert len(root._column_names) <= 64


def test_a_node_that_shows_up_late_at_the_start_loses_nothing():
    own, other = two_nodes()
    root = make_root(4, deadline_seconds=2.0)
    for second in range(int(FIRST_REPORT_SECONDS)):
        for node in (own, other):
            node.write()
        push(root, own, second)
        assert closed(root, second) == []

    push(root, other, FIRST_REPORT_SECONDS - 1)
    steps = closed(root, FIRST_REPORT_SECONDS - 1)
    assert len(steps) == FIRST_REPORT_SECONDS
    assert {step.coverage for step in steps} == {1.0}
    assert root.late == 0


def test_a_node_that_does_not_show_up_is_given_up_until_it_does():
    own, other = two_nodes()
    root = make_root(4)
    own.write()
    push(root, own)
    assert closed(root, FIRST_REPORT_SECONDS - 1) == []

    (step,) = closed(root, FIRST_REPORT_SECONDS)
    assert step.missing_ranks == (2, 3)

    own.write()
    push(root, own, FIRST_REPORT_SECONDS)
    assert len(closed(root, FIRST_REPORT_SECONDS)) == 1, "it is not waited for again"

    other.write()
    other.write()
    other.write()
    push(root, other, FIRST_REPORT_SECONDS)
    own.write()
    push(root, own, FIRST_REPORT_SECONDS)
    (step,) = closed(root, FIRST_REPORT_SECONDS)
    assert step.coverage == 1.0
    assert root.late == 2 * 2


def test_no_more_steps_are_held_open_for_a_stranger_than_it_keeps_itself():
    own, _ = two_nodes()
    root = make_root(4, deadline_seconds=1.0)
    for number in range(STEPS_KEPT):
        own.write()
        if number % 128 == 127:
            push(root, own)
    assert closed(root, 1.0) == []

    own.write()
    push(root, own)
    assert len(closed(root, 1.0)) == STEPS_KEPT + 1


def test_a_node_that_was_there_is_given_up_at_the_deadline():
    own, other = two_nodes()
    root = make_root(4)
    for node in (own, other):
        push(root, node)
    own.write()
    push(root, own)
    assert closed(root, DEADLINE_SECONDS - 1) == []

    (step,) = closed(root, DEADLINE_SECONDS)
    assert step.missing_ranks == (2, 3)


def test_ranks_that_are_dealt_out_to_the_nodes_in_turn_are_all_known():
    """A node that has seen some of its ranks takes the next ones for its own, and may err."""
    own, other = (SimNode(n, [n, n + 2], 4, ddp_step(4)) for n in range(2))
    root = make_root(4)
    root.receive(replace(own.report(), expected_ranks=(0, 1)), 0.0, 0.0, own=True)
    root.receive(replace(other.report(), expected_ranks=(1, 2)), 0.0, 0.0)
    assert root.nodes.has_unreported

    for node in (own, other):
        node.write()
        assert push(root, node).accepted
    assert not root.nodes.has_unreported
    assert [step.coverage for step in closed(root)] == [1.0]


def test_late_rows_are_taken_while_their_step_is_open():
    own, other = two_nodes()
    root = make_root(4)
    own.write()
    push(root, own)
    other.write()
    push(root, other, DEADLINE_SECONDS - 0.1)

    (step,) = closed(root, DEADLINE_SECONDS)
    assert step.coverage == 1.0
    assert root.late == 0


def test_a_report_that_comes_twice_counts_once():
    own, other = two_nodes()
    root = make_root(4)
    for node in (own, other):
        node.write()
    report = other.report()
    for _ in range(3):
        root.receive(report, 0.0, 0.0)
    push(root, own)
    root.receive(report, 0.0, 0.0)

    (step,) = closed(root)
    assert step.get("loss") == 2.5
    root.receive(report, 0.0, 0.0)
    assert closed(root) == []
    assert root.late == 0


def test_a_lost_report_is_asked_for_again():
    own, other = two_nodes()
    root = make_root(4)
    for node in (own, other):
        node.write()
    push(root, own)
    other.report()
    for node in (own, other):
        node.write()
    push(root, own)

    receipt = push(root, other)
    assert not receipt.accepted
    assert receipt.position == 0
    assert push(root, other).accepted
    assert [step.coverage for step in closed(root)] == [1.0, 1.0]


def test_rows_that_are_not_to_be_had_any_more_leave_a_gap_that_is_accepted():
    own, other = two_nodes()
    root = make_root(4)
    for _ in range(3):
        for node in (own, other):
            node.write()
    push(root, own)
    other.restart_at(2)
    assert push(root, other).accepted

    assert [step.coverage for step in closed(root)] == [0.5, 0.5, 1.0]


def test_a_node_that_has_ended_is_not_waited_for():
    own, other = two_nodes()
    root = make_root(4)
    for node in (own, other):
        node.write()
    other.end()
    push(root, own)
    push(root, other)
    own.write()
    push(root, own)

    assert [step.coverage for step in closed(root)] == [1.0, 0.5]


def test_the_clock_of_another_node_says_nothing_about_the_time():
    hour = 3600.0
    own, other = two_nodes(clock_offset_seconds=hour)

    def ahead(rank: int, sequence: int) -> RankStep:
        step = ddp_step(4)(rank, sequence)
        record = make_record(sequence, time_unix_seconds=1_000.0 + hour)
        return RankStep(rank, step.schema, record)

    other = SimNode(1, [2, 3], 4, ahead)
    for first, second in ((own, other), (other, own)):
        root = make_root(4)
        for node in (own, other):
            node.restart_at(0)
        if not own._written:
            for node in (own, other):
                node.write()
        push(root, first, time_unix_seconds=77.0)
        push(root, second, time_unix_seconds=77.0)
        (step,) = closed(root)
        assert step.time_unix_seconds == 100.0, "that of the root's own ranks"

    root = make_root(4)
    other.restart_at(0)
    own.restart_at(1)
    push(root, own, time_unix_seconds=77.0)
    push(root, other, time_unix_seconds=77.0)
    (step,) = closed(root)
    assert step.time_unix_seconds == 77.0, "that of the arrival, where the root has no rank"


def test_the_run_goes_on_until_the_ranks_of_all_nodes_have_ended():
    own, other = two_nodes()
    root = make_root(4)
    push(root, own)
    push(root, other)
    own.end()
    push(root, own)
    assert root.end(1.0) is EndReason.RUNNING

    other.end(EndReason.FAILED)
    push(root, other, 2.0)
    assert root.end(2.0) is EndReason.FAILED


def test_a_node_that_vanished_ends_as_unknown_once_all_else_ended():
    own, other = two_nodes()
    root = make_root(4)
    push(root, own)
    push(root, other)
    assert root.end(DEADLINE_SECONDS) is EndReason.RUNNING, "this node goes on"
    assert [node.active for node in root.nodes.described(DEADLINE_SECONDS)] == [True, False]

    own.end()
    push(root, own, 1.0)
    assert root.end(DEADLINE_SECONDS - 1) is EndReason.RUNNING
    assert root.end(DEADLINE_SECONDS) is EndReason.UNKNOWN

    push(root, other, DEADLINE_SECONDS)
    assert root.end(DEADLINE_SECONDS) is EndReason.RUNNING, "it was heard of again"


def test_the_end_waits_a_little_for_nodes_that_never_reported():
    own, _ = two_nodes()
    root = make_root(4)
    own.end()
    push(root, own)
    assert root.end(1.0) is EndReason.RUNNING
    assert root.end(1.0 + GRACE_SECONDS) is EndReason.COMPLETED


def test_the_nodes_are_known_with_their_addresses():
    own, other = two_nodes()
    root = make_root(4)
    push(root, own)
    push(root, other, 3.0)

    nodes = root.nodes.described(5.0)
    assert [(n.node_rank, n.url, n.ranks, n.silent_seconds) for n in nodes] == [
        (0, "http://host0:9464", (0, 1), 0.0),
        (1, "http://host1:9464", (2, 3), 2.0),
    ]
    assert len(root.nodes.statuses(5.0)) == 4


class TestForeignReports:
    def test_of_an_earlier_attempt_are_dropped(self):
        own, other = two_nodes(session="old")
        root = make_root(4, retired_sessions=["old"])
        own.write()
        other.write()
        push(root, own)

        assert push(root, other).accepted, "nothing is to be sent again"
        assert [node.node_rank for node in root.nodes.described(0.0)] == [0]

    def test_of_a_next_attempt_wait_until_the_root_is_there_too(self):
        own, other = two_nodes()
        root = make_root(4)
        push(root, own)
        push(root, other)
        _, restarted = two_nodes(session="next")
        restarted.write()
        assert not push(root, restarted).accepted

        next_root = make_root(4, retired_sessions=root.nodes.sessions)
        own = SimNode(0, [0, 1], 4, ddp_step(4), session="own next")
        own.write()
        push(next_root, own)
        assert push(next_root, restarted).accepted
        assert [step.coverage for step in closed(next_root)] == [1.0]

    def test_that_are_far_ahead_are_of_another_attempt(self):
        own, other = two_nodes()
        root = make_root(4)
        push(root, own)
        for _ in range(AHEAD_AT_MOST + 1):
            other.write(without=[3])
        other.restart_at(AHEAD_AT_MOST)

        assert not push(root, other).accepted
        assert closed(root, 1e6) == []

    def test_of_another_world_or_of_known_ranks_are_refused(self):
        own, other = two_nodes()
        root = make_root(4)
        push(root, own)
        theirs = own.report().statuses
        refused: list[tuple[dict[str, Any], str]] = [
            ({"world_size": 8}, "of a world of 8, not 4"),
            ({"node_rank": 0}, "two node agents claim to be node 0"),
            ({"statuses": theirs[1:]}, "rank 1 is on node 0, not on 1"),
        ]
        for changes, message in refused:
            with pytest.raises(ReportError, match=message):
                root.receive(replace(other.report(), **changes), 0.0, 0.0)
        assert push(root, other).accepted


@settings(max_examples=40, deadline=None)
@given(st.data(), placements(assumed=False))
def test_no_loss_and_no_restart_changes_a_number(data, placement):
    """Reports are lost and repeated, agents restart; every step is merged once, and right."""
    everyone = list(range(placement.world_size))
    groups = spread(data.draw, everyone)
    groups.sort(key=lambda ranks: 0 not in ranks)
    nodes = [
        SimNode(number, ranks, len(everyone), placement.rank_step)
        for number, ranks in enumerate(groups)
    ]
    root = make_root(len(everyone))
    merged: dict[int, MergedStep] = {}
    own, others = nodes[0], nodes[1:]
    for _ in range(data.draw(st.integers(1, 4))):
        for node in nodes:
            node.write()
    push(root, own)
    for _ in range(data.draw(st.integers(0, 12))):
        node = data.draw(st.sampled_from(nodes))
        action = data.draw(
            st.sampled_from(["push", "lose", "twice", "no answer", "commit", "die", "root dies"])
        )
        if action == "root dies":
            merged = {s: step for s, step in merged.items() if s <= root.settled[0]}
            root = make_root(len(everyone), closed_sequence=root.settled[0])
            own.restart_at(root.settled[0])
            push(root, own)
        elif node is own or action == "commit":
            root.settled = (root.steps.closed_sequence, root.tables.closed_sequence)
        elif action == "push":
            push(root, node)
        elif action == "lose":
            node.report()
        elif action == "die":
            node.restart()
        else:
            report = node.report()
            for _ in range(2):
                receipt = root.receive(report, 0.0, 0.0)
            if action == "twice":
                node.acknowledge(receipt)
        for step in closed(root):
            assert step.sequence not in merged
            merged[step.sequence] = step
    for node in 4 * others:
        push(root, node)
    for step in closed(root):
        merged[step.sequence] = step

    truth = {name: value for name, value in placement.truth().items() if math.isfinite(value)}
    assert sorted(merged) == list(range(1, own._written + 1))
    for step in merged.values():
        assert {name: step.get(name) for name in truth} == pytest.approx(truth, rel=1e-12)
        assert step.coverage == 1.0
    assert root.late == 0


def test_layers_come_after_their_step_and_from_all_nodes():
    def fsdp(rank: int, sequence: int) -> RankStep:
        share = Share(group="fsdp", shard_index=rank, shard_count=4)
        return rank_step(rank, make_record(sequence), share)

    own, other = (SimNode(n, [2 * n, 2 * n + 1], 4, fsdp) for n in range(2))
    root = make_root(4)
    for node in (own, other):
        node.write_layers(
            1,
            [
                rank_layers(r, fsdp(r, 1).schema, gradient_row(sum_squares=1.0)[None])
                for r in node.ranks
            ],
        )
        push(root, node)
    assert list(root.close_ready(0.0)) == []

    for node in (own, other):
        node.write()
        push(root, node)
    step, table = root.close_ready(0.0)
    assert isinstance(step, MergedStep)
    assert isinstance(table, MergedTable)
    layers = table.families[GRADIENTS.name]
    assert layers.complete
    assert layers.values[0, 0] == 4.0


def test_the_rank_furthest_behind_is_of_any_node_that_is_heard_of():
    own, other = two_nodes()
    root = make_root(4)
    own.write()
    own.write()
    other.write()
    push(root, own)
    push(root, other)
    behind = root.nodes.furthest_behind(0.0)
    assert behind is not None and behind.rank == 2

    push(root, own, now_seconds=DEADLINE_SECONDS)
    behind = root.nodes.furthest_behind(DEADLINE_SECONDS)
    assert behind is not None and behind.rank == 0, "the other node is silent"


class TestReduced:
    """The ranks reduce by themselves: rank 0's record says it some steps later."""

    LAG = 2

    def of(self, sequence: int, *, loss: float = 2.5) -> GlobalStatistics:
        return GlobalStatistics(
            sequence=sequence,
            step=sequence,
            world_size=4,
            present_ranks=4,
            columns={"loss": loss},
            gradients={"sum_squares": float(sequence) ** 2, "elements": 4.0},
            complete=True,
        )

    def test_a_run_whose_nodes_do_not_reach_the_root_has_the_numbers_of_all_ranks(self):
        own, _ = two_nodes()
        root = make_root(4)
        steps: list[MergedStep] = []
        for sequence in range(1, 10):
            now_seconds = FIRST_REPORT_SECONDS + sequence
            own.write()
            push(root, own, 0.0 if sequence == 1 else now_seconds)
            if sequence > self.LAG:
                root.note_reduced(self.of(sequence - self.LAG), now_seconds)
            steps += closed(root, now_seconds)
        assert [step.sequence for step in steps] == list(range(1, 10 - self.LAG))
        # The first ones came before it was known that the ranks reduce.
        assert {step.coverage for step in steps[self.LAG :]} == {1.0}
        assert {step.get("loss") for step in steps[self.LAG :]} == {2.5}
        assert [step.grad_norm for step in steps] == [float(step.sequence) for step in steps]

        # What is not reduced any more waits no longer than the deadline.
        rest = closed(root, now_seconds + DEADLINE_SECONDS)
        assert [step.missing_ranks for step in rest] == [(2, 3)] * self.LAG
        assert {step.get("loss") for step in rest} == {1.5}

    def test_where_all_nodes_report_nothing_waits_for_it_and_nothing_changes(self):
        steps = []
        for reduces in (False, True):
            own, other = two_nodes()
            root = make_root(4)
            found: list[MergedStep] = []
            for sequence in range(1, 6):
                own.write()
                other.write()
                push(root, own)
                if reduces and sequence > self.LAG:
                    root.note_reduced(self.of(sequence - self.LAG, loss=-1.0), 0.0)
                push(root, other)
                found += closed(root)
            steps.append(found)
        assert len(steps[0]) == 5
        assert steps[0] == steps[1]
        assert {step.get("loss") for step in steps[1]} == {2.5}
