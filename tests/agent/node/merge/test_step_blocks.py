"""Steps that are sent and merged as arrays say bit for bit what single steps say."""

import random
import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from mp_agent.errors import ReportError
from mp_agent.node.merge.node_steps import RankStep
from mp_agent.node.merge.step_blocks import in_blocks
from mp_agent.records.merged import MergedStep
from mp_agent.records.node_report import NodeReport
from mp_agent.records.reports import decode_report, encode_report
from mp_agent.records.schema import Share
from tests.agent.node.builders import gradient_row, make_record, rank_step
from tests.agent.node.expanded import expanded
from tests.agent.node.fleet import SimNode, make_root, steps_of
from tests.agent.node.placements import placements, spread
from tests.subtests import each

STEPS = 3


def hsdp(rank: int, sequence: int) -> RankStep:
    """Four ranks: two shards, two replicas; a loss on every second step."""
    share = Share(
        group="hsdp", shard_index=rank % 2, shard_count=2, replica_index=rank // 2, replica_count=2
    )
    row = gradient_row(sum_squares=0.1 + rank % 2, elements=4.0)
    values = {"loss": 1.0 + rank / 3, "compute_seconds": 0.25} if sequence % 2 else {}
    return rank_step(rank, make_record(sequence, values, [row], step=10 * sequence), share)


def report_of(*ranks: int, steps: int = STEPS, step_of: Any = hsdp, world_size: int = 4):
    node = SimNode(ranks[0], ranks, world_size, step_of)
    for _ in range(steps):
        node.write()
    return node.report()


def merged(reports: list[NodeReport]) -> list[MergedStep]:
    root = make_root(reports[0].world_size)
    for report in reports:
        root.receive(report, 0.0, 5_000.0, own=report.node_rank == reports[0].node_rank)
    return steps_of(root.close_all())


def test_what_a_block_holds_is_what_the_steps_were():
    report = report_of(0, 1)
    single = expanded(report)
    assert [len(block.sequences) for block in report.blocks] == [2, 1], "with a loss, and without"
    assert [step.sequence for step in single.steps] == [1, 2, 3]
    assert [step.step for step in single.steps] == [10, 20, 30]
    blocks, others = in_blocks(single.steps)
    assert (blocks, others) == (report.blocks, ())
    assert [step.losses for step in single.steps] == [(1.0, 1.0 + 1 / 3), (), (1.0, 1.0 + 1 / 3)]
    assert [dict(step.compute_seconds) for step in merged([report])] == [
        {0: 0.25, 1: 0.25},
        {},
        {0: 0.25, 1: 0.25},
    ]
    assert [step.losses for step in merged([report])] == [
        {0: 1.0, 1: 1.0 + 1 / 3},
        {},
        {0: 1.0, 1: 1.0 + 1 / 3},
    ]


def test_a_step_on_which_batches_were_looked_at_goes_by_itself():
    def step_of(rank: int, sequence: int) -> RankStep:
        share = Share(group="ddp", replica_index=rank, replica_count=2)
        values = {"batch_digest": 7.0, "batch_rows": 8.0} if sequence == 2 else {}
        return rank_step(rank, make_record(sequence, values, [gradient_row(elements=4.0)]), share)

    report = report_of(0, 1, step_of=step_of, world_size=2)
    assert [step.sequence for step in report.steps] == [2]
    assert [step.batch_rows for step in merged([report])] == [{}, {0: 8.0, 1: 8.0}, {}]


def test_a_step_with_something_not_finite_goes_by_itself():
    def step_of(rank: int, sequence: int) -> RankStep:
        share = Share(group="ddp", replica_index=rank, replica_count=2)
        values = {"loss_nonfinite": float(sequence == 2 and rank == 1)}
        return rank_step(rank, make_record(sequence, values, [gradient_row(elements=4.0)]), share)

    report = report_of(0, 1, step_of=step_of, world_size=2)
    assert [step.sequence for step in report.steps] == [2]
    assert [block.sequences for block in report.blocks] == [(1, 3)]
    assert [step.nonfinite_loss_ranks for step in merged([report])] == [(), (1,), ()]


@settings(max_examples=60, deadline=None)
@given(st.data(), placements())
def test_blocks_merge_to_the_bits_of_single_steps(data, placement):
    ranks = list(range(placement.world_size))
    groups = sorted(spread(data.draw, ranks), key=lambda own: 0 not in own)
    reports = [
        report_of(*own, step_of=placement.rank_step, world_size=len(ranks), steps=2)
        for own in groups
    ]
    reports = [replace(report, node_rank=number) for number, report in enumerate(reports)]
    reports[1:] = data.draw(st.permutations(reports[1:]))
    some = [expanded(own) if at % 2 else own for at, own in enumerate(reports)]
    found, single = merged(reports), merged([expanded(report) for report in reports])
    assert list(map(repr, found)) == list(map(repr, single))
    assert list(map(repr, merged(some))) == list(map(repr, single))


@each("seed", range(8))
def test_steps_without_some_nodes_merge_to_the_bits_of_single_steps(seed):
    """Nodes begin late, stay away, come in any order, and see other columns at times."""
    chance = random.Random(seed)

    def step_of(rank: int, sequence: int) -> RankStep:
        share = Share(group="fsdp", shard_index=rank, shard_count=12)
        values = {"loss": chance.choice([0.0, -0.0, 1e308, chance.random()])}
        if chance.random() < 0.8:
            values["compute_seconds"] = chance.random()
        row = {"sum_squares": chance.choice([0.0, -0.0, 1e308, chance.random()]), "elements": 4.0}
        if rank >= 8 and sequence % 2:
            row["abs_max"] = chance.random()
        return rank_step(rank, make_record(sequence, values, [gradient_row(**row)]), share)

    nodes = [SimNode(rank // 2, (rank, rank + 1), 12, step_of) for rank in range(0, 12, 2)]
    reports = []
    for steps in (3, 4):
        for node in nodes[: chance.randint(1, 6)]:
            for _ in range(chance.randint(1, steps)):
                node.write()
        others = [node.report() for node in chance.sample(nodes[1:], 5)]
        reports += [nodes[0].report(), *others]
    found, single = merged(reports), merged([expanded(report) for report in reports])
    assert list(map(repr, found)) == list(map(repr, single))


def test_a_column_that_only_one_node_knows_spoils_no_other_row():
    reports = [report_of(0, 1), report_of(2, 3)]
    block, families = reports[1].blocks[0], reports[1].families
    width = len(families[0].columns)
    families = (replace(families[0], columns=(*families[0].columns, "of_another_release")),)
    row = replace(block.form.rows[0], places=(*block.form.rows[0].places, width))
    values = np.append(block.array(), np.full((len(block.sequences), 1), 7.0), axis=1)
    block = replace(block, form=replace(block.form, rows=(row,)), values=values.tobytes())
    other = replace(reports[1], families=families, blocks=(block, *reports[1].blocks[1:]))
    assert repr(merged([reports[0], decode_report(encode_report(other))])) == repr(merged(reports))


def test_a_report_of_the_format_before_is_read():
    report = expanded(report_of(0, 1))
    body = bytearray(encode_report(report))
    assert body[1] == 7
    body[1] = 6
    assert repr(decode_report(bytes(body))) == repr(report)


REPORT = report_of(2, 3)


def forged(**changes: Any) -> bytes:
    return encode_report(replace(REPORT, blocks=(replace(REPORT.blocks[0], **changes),)))


def formed(**changes: Any) -> bytes:
    return forged(form=replace(REPORT.blocks[0].form, **changes))


@each(
    ("body", "reason"),
    [
        (forged(sequences=(3, 1)), "do not ascend"),
        (forged(sequences=(1, 9)), "not from 0 to 3"),
        (forged(steps=(10,)), "not as many"),
        (forged(times_unix_seconds=(1.0, float("nan"))), "time of"),
        (forged(values=REPORT.blocks[0].values[8:]), "bytes"),
        (forged(values=b"\xff" * len(REPORT.blocks[0].values)), "no observation"),
        (forged(digests=b""), "bytes"),
        (formed(ranks=(2, 9)), "ranks of block of step 1: 9 is none of the node's 2 ranks"),
        (formed(ranks=(0, 1)), "ranks of block of step 1: 0 is none of the node's 2 ranks"),
        (formed(ranks=()), "no ranks"),
        (formed(holding=7), "holding"),
        (formed(counts=()), "counts"),
        (formed(counts=(3, *REPORT.blocks[0].form.counts[1:])), "3 observations on 2 ranks"),
        (formed(counts=(0, *REPORT.blocks[0].form.counts[1:])), "0 observations on 2 ranks"),
        (formed(rows=2 * REPORT.blocks[0].form.rows), "two rows of share 0 of ranks"),
        (formed(places=(3, 2, 1)), "counts|ascend"),
        (encode_report(replace(REPORT, blocks=2 * REPORT.blocks[:1])), "not unique"),
    ],
)
def test_a_block_that_contradicts_itself_is_refused_with_the_reason(body, reason):
    with pytest.raises(ReportError, match=reason):
        decode_report(body)


def test_a_negative_value_is_found_next_to_one_that_is_absent():
    values = REPORT.blocks[0].array().copy()
    values[0, -1], values[1, -1] = float("nan"), -1.0
    with pytest.raises(ReportError, match="negative"):
        decode_report(forged(values=values.tobytes()))


def test_kinds_of_rows_that_no_node_sends_any_more_are_forgotten():
    """A node whose rows are of another kind each time would fill memory."""

    def step_of(rank: int, sequence: int) -> RankStep:
        share = Share(group=f"group of step {sequence}", replica_index=rank, replica_count=4)
        return rank_step(rank, make_record(sequence, {}, [gradient_row(elements=4.0)]), share)

    root = make_root(4)
    nodes = [SimNode(number, ranks, 4, step_of) for number, ranks in enumerate([(0, 1), (2, 3)])]
    for _ in range(20):
        for node in nodes:
            node.write()
            node.acknowledge(root.receive(node.report(), 0.0, 5_000.0, own=node.number == 0))
        (step,) = steps_of(root.close_ready(0.0))
        assert step.coverage == 1.0
    assert len(root._forms._kinds) == 1


def merge_seconds(rows: int) -> float:
    """Return how long a step takes that has so many rows with digests."""
    form = REPORT.blocks[0].form
    share = REPORT.shares[form.rows[0].share]
    shares = tuple(replace(share, group=f"group {number}") for number in range(rows))
    row = replace(form.rows[0], places=(), compared=True)
    form = replace(form, rows=tuple(replace(row, share=number) for number in range(rows)))
    digests = np.zeros(rows * len(row.shards), dtype="<u4").tobytes()
    block = replace(REPORT.blocks[0], form=form, digests=digests, sequences=(1,), steps=(1,))
    block = replace(
        block,
        times_unix_seconds=(1.0,),
        values=block.values[: 8 * form.first_of_rows],
    )
    report = replace(REPORT, shares=shares, blocks=(block,), held=(), holdings=((0,),))
    body = encode_report(report)
    times = []
    for _ in range(3):
        began = time.process_time()
        assert len(merged([decode_report(body)])) == 1
        times.append(time.process_time() - began)
    return min(times)


def test_a_row_takes_no_longer_because_there_are_many():
    merge_seconds(8)
    assert merge_seconds(4_000) < 24 * merge_seconds(500)
