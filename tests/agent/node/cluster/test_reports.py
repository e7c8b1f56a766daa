"""Rows wait for the root, within bounds, and are sent again when they are asked for."""

from dataclasses import replace

import pytest

from mp_agent.node.cluster import reports as reporter_module
from mp_agent.node.cluster.reports import RowQueue, is_troubled, row_bytes
from mp_agent.node.merge.node_steps import RankStep
from mp_agent.records.columns import GRADIENTS, step_columns
from mp_agent.records.node_report import LayerBlock, NodeLayers, NodeRow, NodeStep, Receipt
from mp_agent.records.reports import decode_report, encode_report
from tests.agent.node.builders import guarded_step
from tests.agent.node.cluster.test_root import ddp_step
from tests.agent.node.expanded import expanded
from tests.agent.node.fleet import SimNode
from tests.subtests import each


def row(sequence: int) -> NodeStep:
    return NodeStep(
        sequence=sequence,
        step=sequence,
        time_unix_seconds=0.0,
        ranks=(0,),
        holding=0,
        values=(),
        rows=(),
        compute_seconds=(0.0,),
    )


def outbox(*sequences: int, limit: int = 100) -> RowQueue[NodeStep]:
    box: RowQueue[NodeStep] = RowQueue(limit, 0, 0, 0)
    for sequence in sequences:
        box.add(row(sequence))
    return box


def sequences(rows: tuple[NodeStep, ...]) -> list[int]:
    return [row.sequence for row in rows]


def test_rows_are_handed_out_once_and_in_order():
    box = outbox(1, 2, 4)
    after, rows, position = box.pop(10)
    assert (after, sequences(rows), position) == (0, [1, 2, 4], 4)
    assert box.pop(10) == (4, (), 4)
    assert not box.waiting


def test_what_does_not_fit_into_one_report_is_left_over():
    box = outbox(1, 2, 3)
    after, rows, position = box.pop(2)
    assert (after, sequences(rows), position) == (0, [1, 2], 2)
    assert box.overdue

    after, rows, position = box.pop(2)
    assert (after, sequences(rows), position) == (2, [3], 3)
    assert not box.overdue


def test_progress_without_a_row_is_reported_too():
    box = outbox(1)
    box.pop(10)
    box.advance(5)
    assert box.waiting
    assert box.pop(10) == (1, (), 5)


def test_rows_are_handed_out_again_from_where_the_root_says():
    box = outbox(1, 2, 3)
    box.pop(10)
    box.rewind(1)
    assert box.overdue
    assert sequences(box.pop(10)[1]) == [2, 3]


def test_what_is_settled_is_let_go():
    box = outbox(1, 2, 3)
    box.pop(10)
    box.settle(2)
    box.rewind(0)
    assert box.oldest == 2
    assert sequences(box.pop(10)[1]) == [3]
    assert list(box.rows) == [3]


def test_the_oldest_rows_are_lost_first_and_counted_if_never_delivered():
    box = outbox(1, 2, 3, 4, limit=2)
    assert box.lost == 2
    assert sequences(box.pop(10)[1]) == [3, 4]
    box.add(row(5))
    assert box.lost == 2, "the root may have had it"
    assert box.oldest == 3
    box.add(row(6))
    box.settle(3)
    box.rewind(3)
    assert box.lost == 3, "the root has asked for what followed the third"
    box.rewind(3)
    assert box.lost == 3


def test_rows_that_wait_are_bounded_in_bytes_and_what_had_to_go_is_counted():
    size = row_bytes(row(1))
    box: RowQueue[NodeStep] = RowQueue(100, 0, 0, 0, bytes_max=3 * size)
    for sequence in range(1, 6):
        box.add(row(sequence))
    assert (list(box.rows), box.lost, box.oldest) == ([3, 4, 5], 2, 2)
    assert box.size_bytes == 3 * size
    box.pop(10)
    box.settle(5)
    assert box.size_bytes == 0

    narrow: RowQueue[NodeStep] = RowQueue(100, 0, 0, 0, bytes_max=size - 1)
    narrow.add(row(1))
    narrow.add(row(2))
    assert (list(narrow.rows), narrow.lost) == ([2], 1), "the newest is kept, however large"


@pytest.mark.parametrize("layers", [1, 1000])
def test_the_size_of_a_layer_table_is_that_of_its_values(layers):
    values = bytes(8 * layers)
    block = LayerBlock(
        family=0, share=0, layout=0, shards=(0,), replicas=(0,), ranks=(0,), values=values
    )
    table = NodeLayers(sequence=1, blocks=(block, block))
    assert 2 * len(values) <= row_bytes(table) <= 2 * len(values) + 200


def test_a_report_holds_the_layouts_that_it_refers_to_alone(monkeypatch):
    monkeypatch.setattr(reporter_module, "STEPS_PER_REPORT", 2)
    node = SimNode(1, [2, 3], 4, ddp_step(4))
    for _ in range(3):
        node.write()
    first, second = expanded(node.report()), expanded(node.report())

    assert [step.sequence for step in first.steps] == [1, 2]
    assert [step.sequence for step in second.steps] == [3]
    assert first.layouts == second.layouts == ()
    assert (first.after, first.position, second.after, second.position) == (0, 2, 2, 3)


def test_only_a_report_with_the_last_rows_of_ended_ranks_is_final(monkeypatch):
    monkeypatch.setattr(reporter_module, "STEPS_PER_REPORT", 2)
    node = SimNode(1, [2, 3], 4, ddp_step(4))
    for _ in range(3):
        node.write()
    node.end()

    assert [node.report().final for _ in range(3)] == [False, True, True]


def test_a_receipt_settles_and_rewinds():
    node = SimNode(1, [2, 3], 4, ddp_step(4))
    for _ in range(3):
        node.write()
    node.report()
    refusal = Receipt(
        session=node.session,
        accepted=False,
        position=2,
        layers_position=0,
        settled=1,
        layers_settled=0,
    )
    node.acknowledge(refusal)

    assert [step.sequence for step in expanded(node.report()).steps] == [3]
    assert node.reporter.steps.oldest == 1


def test_too_large_reports_come_back_with_half_the_steps_until_one_is_given_up():
    node = SimNode(1, [2, 3], 4, ddp_step(4))
    for _ in range(7):
        node.write()

    def refused() -> list[int]:
        report = node.report()
        node.reporter.resend(report)
        assert node.reporter.make_smaller(report)
        return [step.sequence for step in expanded(report).steps]

    assert [refused() for _ in range(3)] == [[1, 2, 3, 4, 5, 6, 7], [1, 2, 3], [1]]
    assert node.reporter.steps.lost == 1
    report = node.report()
    assert [step.sequence for step in expanded(report).steps] == [2]
    # The root asks for nothing before it.
    assert report.oldest == report.after == 1


def test_a_report_without_steps_that_is_too_large_cannot_be_made_smaller():
    node = SimNode(1, [2, 3], 4, ddp_step(4))
    report = node.report()
    assert not node.reporter.make_smaller(report)


def test_a_damaged_receipt_settles_nothing_that_was_not_sent():
    node = SimNode(1, [2, 3], 4, ddp_step(4))
    node.write()
    sent = node.report()
    node.write()
    damaged = Receipt(
        session=node.session,
        accepted=True,
        position=sent.position,
        layers_position=0,
        settled=1 << 40,
        layers_settled=1 << 40,
    )
    node.acknowledge(damaged)
    assert [step.sequence for step in expanded(node.report()).steps] == [2]


FAMILY = replace(
    GRADIENTS,
    columns=tuple(
        column
        for column in GRADIENTS.columns
        if column.name in ("sum_squares", "nan_elements", "inf_elements")
    ),
    required=("sum_squares",),
    size="sum_squares",
)
"""Of three columns."""


def step(*columns: tuple[float, ...], loss: tuple[int, ...] = ()) -> NodeStep:
    rows = tuple(
        NodeRow(family=0, share=0, shards=(0,), replicas=(0,), ranks=(2,), columns=row)
        for row in columns
    )
    return NodeStep(
        sequence=1,
        step=1,
        time_unix_seconds=1.0,
        holding=0,
        ranks=(2, 3),
        values=(),
        rows=rows,
        compute_seconds=(0.1, 0.1),
        nonfinite_loss_ranks=loss,
    )


@each(
    ("seen", "troubled"),
    [
        (step((1.0, 0.0, 0.0)), False),
        (step((1e30, 0.0, 0.0), (0.0, 0.0, 0.0)), False),
        (step((1.0, 3.0, 0.0)), True),
        (step((1.0, 0.0, 0.0), (1.0, 0.0, 1.0)), True),
        (step((1.0, 0.0, 0.0), loss=(3,)), True),
        (step(), False),
    ],
)
def test_what_is_not_finite_is_trouble(seen, troubled):
    assert is_troubled(seen, (FAMILY,)) is troubled


def test_a_node_that_does_not_count_them_has_no_trouble():
    uncounted = replace(FAMILY, columns=FAMILY.columns[:1], nonfinite=())
    assert not is_troubled(step((1.0,)), (uncounted,))


def test_a_report_has_columns_of_a_guard_only_where_a_rank_has_one():
    node = SimNode(0, [0, 1], 2, ddp_step(2))
    node.write()
    plain = node.report()
    assert not set(plain.step_columns) - set(step_columns(guarded=False))

    node = SimNode(
        0, [0, 1], 2, lambda rank, sequence: guarded_from_2(ddp_step(2)(rank, sequence), sequence)
    )
    node.write()
    node.write()
    report = expanded(decode_report(encode_report(node.report())))
    assert [len(step.values) for step in report.steps] == [len(report.step_columns)] * 2
    before, after = (dict(zip(report.step_columns, s.values, strict=True)) for s in report.steps)
    assert (before["guard_skip_update"].count, after["guard_skip_update"].count) == (0, 2)
    assert before["loss"].count == after["loss"].count == 2


def guarded_from_2(step: RankStep, sequence: int) -> RankStep:
    """A guard that is on from the second step on: the rows before have no such column."""
    return step if sequence == 1 else guarded_step(step, guard_skip_update=0.0)
