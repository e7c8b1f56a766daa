import contextlib
import math
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from mp_agent.errors import ReportError, ReportTooLarge
from mp_agent.node.merge.node_steps import RankStep
from mp_agent.records import reports
from mp_agent.records.node_report import NodeReport, OwnNonfinite, Receipt, StepValue, layout_digest
from mp_agent.records.reports import decode_receipt, decode_report, encode_receipt, encode_report
from mp_agent.records.schema import FamilyColumns, Share
from tests.agent.node.builders import gradient_row, make_record, make_schema, rank_layers, rank_step
from tests.agent.node.expanded import expanded
from tests.agent.node.fleet import SimNode, make_root, push
from tests.subtests import each

VALUES = {"loss": 1.5, "compute_seconds": 0.25}

RECEIPT = Receipt(
    session="s", accepted=False, position=7, layers_position=5, settled=3, layers_settled=2
)


def fsdp(rank: int, sequence: int) -> RankStep:
    share = Share(group="fsdp", shard_index=rank, shard_count=4, home="0-3")
    row = gradient_row(sum_squares=0.1 + rank, elements=4.0)
    return rank_step(rank, make_record(sequence, VALUES, [row]), share)


def full_report() -> NodeReport:
    node = SimNode(1, [2, 3], 4, fsdp)
    node.write()
    node.write(without=[2])
    schemas = {r: make_schema(Share(group="g"), layers=("a", "b")) for r in (2, 3)}
    tables = [
        rank_layers(r, schemas[r], gradient_row(sum_squares=1.0)[None].repeat(2, 0)) for r in (2, 3)
    ]
    node.write_layers(1, tables)
    return node.report()


SENT = full_report()
REPORT = expanded(SENT)
LAYOUT = REPORT.layouts[0]


def changed(**changes: Any) -> bytes:
    return encode_report(replace(REPORT, **changes))


def with_step(**changes: Any) -> bytes:
    return changed(steps=(replace(REPORT.steps[0], **changes), *REPORT.steps[1:]))


def with_row(**changes: Any) -> bytes:
    return with_step(rows=(replace(REPORT.steps[0].rows[0], **changes),))


def with_block(**changes: Any) -> bytes:
    table = REPORT.layers[0]
    return changed(layers=(replace(table, blocks=(replace(table.blocks[0], **changes),)),))


def test_what_was_encoded_is_read_back_exactly():
    # NaN, which stands for what was not observed, is not equal to itself.
    assert repr(decode_report(encode_report(REPORT))) == repr(REPORT)
    assert decode_receipt(encode_receipt(RECEIPT)) == RECEIPT


def test_not_observed_and_beyond_float64_go_through():
    step = replace(REPORT.steps[0], compute_seconds=(math.nan, math.inf))
    read = decode_report(changed(steps=(step, REPORT.steps[1])))

    assert math.isnan(read.steps[0].compute_seconds[0])
    assert read.steps[0].compute_seconds[1] == math.inf


@each(
    "data",
    [
        b"",
        b"\xc1",
        b"hello",
        b"\x93\x02",
        msgspec.msgpack.encode([reports.RECEIPT_FORMAT, [1, 2]]),
        b"\xdd" + b"\xff" * 4,
    ],
)
def test_garbage_is_no_report(data):
    with pytest.raises(ReportError, match="not a report"):
        decode_report(data)
    with pytest.raises(ReportError, match="not a receipt"):
        decode_receipt(data)


def test_deep_nesting_is_no_report():
    with pytest.raises(ReportError, match="not a report"):
        decode_report(b"\x91" * 100_000)


def test_another_format_is_named_before_anything_else_is_read():
    with pytest.raises(
        ReportError, match=rf"report of format 9; this agent reads format {reports.FORMAT}"
    ):
        decode_report(msgspec.msgpack.encode([9, "anything"]))


def test_an_absurd_size_is_refused_unread(monkeypatch):
    monkeypatch.setattr(reports, "REPORT_BYTES_MAX", 1000)
    with pytest.raises(ReportError, match="the limit is 1000"):
        decode_report(b"\0" * 1001)


@each(
    ("data", "message"),
    [
        (changed(world_size=0), "`int` >= 1"),
        (changed(world_size=3), "expected_ranks: 3 is not below 3"),
        (changed(expected_ranks=(3, 2)), "expected_ranks do not ascend"),
        (changed(run=7), "`str`"),
        (changed(known_ranks=(3, 2)), "known_ranks do not ascend"),
        (changed(known_ranks=(2, 2, 3)), "known_ranks do not ascend"),
        (changed(known_ranks=(1, 2)), "known_ranks: 1 is none of the node's 2 ranks"),
        (changed(held=(1, 0)), "shares of holdings do not ascend"),
        (changed(holdings=((0, 0),)), "shares of holdings do not ascend"),
        (changed(held=(9,)), "holdings: 9 is not below 2"),
        (changed(holdings=((9,),)), "holdings: 9 is not below 2"),
        (changed(sent_unix_seconds=math.inf), "sent_unix_seconds is inf"),
        (changed(after=2), "steps are not those from 2 to 2"),
        (changed(position=1), "steps are not those from 0 to 1"),
        (changed(after=9), "steps after 9 cannot end at 2"),
        (changed(steps=REPORT.steps[::-1]), "sequences of steps do not ascend"),
        (changed(blocks=SENT.blocks), "sequences of steps and blocks are not unique"),
        (changed(layouts=(replace(LAYOUT, names=("a", "c")),)), "digest .* is not its own"),
        (changed(layouts=(replace(LAYOUT, names=("a",), positions=(0,)),)), "is not its own"),
        (changed(layouts=(replace(LAYOUT, positions=(0,)),)), "as many positions as names"),
        (changed(families=(*REPORT.families, *REPORT.families)), "families are not unique"),
        (changed(families=(FamilyColumns("f", ("a", "a")),)), "columns of f are not unique"),
        (with_row(family=9), f"family of step 1: 9 is not below {len(REPORT.families)}"),
        (with_block(family=9), f"family of layer block: 9 is not below {len(REPORT.families)}"),
        (with_step(ranks=(3, 2)), "ranks of step 1 do not ascend"),
        (with_step(ranks=(), compute_seconds=()), "step 1 has 0 ranks"),
        (with_step(time_unix_seconds=math.nan), "time of step 1 is nan"),
        (with_step(holding=5), "holding of step 1: 5 is not below 1"),
        (with_step(values=()), "step 1 has 0 values, not"),
        (with_step(nonfinite_loss_ranks=(0,)), "ranks that did not deliver it"),
        (
            with_step(nonfinite_gradients=OwnNonfinite(backward=1, ranks=(0,))),
            "ranks that did not deliver it",
        ),
        (with_step(nonfinite_gradients=OwnNonfinite(backward=0, ranks=())), "`int` >= 1"),
        (with_step(ranks=(0, 1)), "ranks of step 1: 0 is none of the node's 2 ranks"),
        (with_step(rows=2 * REPORT.steps[0].rows), "step 1 has two rows of share 0"),
        (with_row(share=4), "share of step 1: 4 is not below 2"),
        (with_row(shards=(2, 9)), "shards of step 1: 9 is not below 4"),
        (with_row(replicas=(1,)), "replicas of step 1: 1 is not below 1"),
        (with_row(ranks=(2,)), "a row of 2 parts and 1 ranks"),
        (with_row(ranks=(0, 1)), "rows of ranks that did not deliver it"),
        (with_row(columns=()), "a row of 0 columns"),
        (with_row(digests=(1,)), "1 digests of 2 shards"),
        (
            with_step(values=(StepValue(count=0, value=1.0), *REPORT.steps[0].values[1:])),
            "value 1.0 of 0",
        ),
        (
            with_step(values=(StepValue(count=2, value=math.nan), *REPORT.steps[0].values[1:])),
            "nan of 2",
        ),
        (
            with_step(values=(StepValue(count=3, value=1.0), *REPORT.steps[0].values[1:])),
            "1.0 of 3 observations on 2 ranks",
        ),
        (with_block(ranks=(0,)), "ranks of a layer block: 0 is none of the node's 2 ranks"),
        (with_block(layout=3), "layout of a layer block: 3 is not below 1"),
        (with_block(values=b"\0" * 8), "a layer block of 2 layers has 8 bytes"),
    ],
)
def test_what_contradicts_itself_is_refused_and_named(data, message):
    with pytest.raises(ReportError, match=message):
        decode_report(data)


@pytest.mark.parametrize(
    ("limit", "what"),
    [
        ("ROWS_PER_REPORT", "rows"),
        ("LAYERS_PER_REPORT", "layers"),
        ("SHARES_PER_REPORT", "shares"),
        ("HELD_PER_REPORT", "shares in holdings"),
        ("COLUMNS_PER_REPORT", "columns"),
    ],
)
def test_more_than_a_root_accepts_is_too_large(limit, what, monkeypatch):
    """The sender leaves out its layers then, and does not send the same again for ever."""
    monkeypatch.setattr(reports, "_passed", set())
    monkeypatch.setattr(reports, limit, 1)
    for report in (SENT, REPORT):
        with pytest.raises(ReportTooLarge, match=rf"a report of \d+ {what}; the limit is 1"):
            decode_report(encode_report(report))


def test_rows_of_a_form_count_as_often_as_it_has_steps(monkeypatch):
    node = SimNode(1, [2, 3], 4, fsdp)
    for _ in range(200):
        node.write()
    report = node.report()
    (form,) = {block.form for block in report.blocks}
    rows = 200 * len(form.rows)
    body = encode_report(report)
    monkeypatch.setattr(reports, "ROWS_PER_REPORT", rows)
    assert decode_report(body) == report
    monkeypatch.setattr(reports, "ROWS_PER_REPORT", rows - 1)
    with pytest.raises(ReportTooLarge, match=f"a report of {rows} rows"):
        decode_report(body)


def test_a_hundred_thousand_layers_are_accepted():
    names = tuple(f"model.layers.{number}.weight" for number in range(100_000))
    positions = tuple(range(100_000))
    layout = replace(
        LAYOUT, digest=layout_digest(names, positions), names=names, positions=positions
    )
    assert decode_report(changed(layouts=(layout,), layers=())).layouts == (layout,)


def test_what_is_alike_in_most_reports_is_checked_once(monkeypatch):
    checked: list[str] = []
    place = reports._check_place

    def noted(terms: Any, row: Any, what: str) -> None:
        checked.append(what)
        place(terms, row, what)

    monkeypatch.setattr(reports, "_passed", set())
    monkeypatch.setattr(reports, "_check_place", noted)
    bodies = [encode_report(SENT), encode_report(REPORT)]
    for _ in range(3):
        for body in bodies:
            decode_report(body)
    assert sorted(set(checked)) == [
        "block of step 1",
        "block of step 2",
        "layer block",
        "step 1",
        "step 2",
    ]
    rows = sum(len(step.rows) for step in REPORT.steps) * 2
    assert len(checked) == rows + len(REPORT.layers[0].blocks)


def test_what_has_passed_is_checked_again_where_it_refers_to_something_else():
    for report in (SENT, REPORT):
        decode_report(encode_report(report))
        shares = tuple(replace(share, shard_count=2) for share in report.shares)
        with pytest.raises(ReportError, match=r"shards of .* is not below 2"):
            decode_report(encode_report(replace(report, shares=shares)))
        with pytest.raises(ReportError, match=r"holding of .*: 0 is not below 0"):
            decode_report(encode_report(replace(report, holdings=())))
        with pytest.raises(ReportError, match="is none of the node's 1 ranks"):
            decode_report(encode_report(replace(report, statuses=report.statuses[:1])))


@pytest.mark.parametrize("value", [-1.0, -math.inf])
def test_a_sum_of_squares_below_zero_is_refused(value):
    row = REPORT.steps[0].rows[0]
    forged = replace(row, columns=(value, *row.columns[1:]))
    with pytest.raises(ReportError, match="negative"):
        decode_report(with_step(rows=(forged, *REPORT.steps[0].rows[1:])))


def test_the_format_before_is_refused_by_name():
    """Its rows had no family."""
    with pytest.raises(ReportError, match=rf"format 3; this agent reads format {reports.FORMAT}"):
        decode_report(msgspec.msgpack.encode([3, REPORT]))


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_change_of_a_byte_is_refused_or_harmless(data):
    """Whatever comes in: one clear error, or numbers that the root can merge."""
    body = bytearray(encode_report(REPORT))
    for _ in range(data.draw(st.integers(1, 3))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    own = SimNode(0, [0, 1], 4, fsdp)
    own.write()
    own.write()
    root = make_root(4)
    push(root, own)
    with contextlib.suppress(ReportError):
        root.receive(decode_report(bytes(body)), 0.0, 0.0)
    for item in root.close_all():
        values = getattr(item, "values", {})
        assert all(map(math.isfinite, values.values()))


def test_a_report_of_a_usual_node_is_small():
    """Eight replicas of a thousand layers, one step: the rows of the layers stay away."""

    def ddp(rank: int, sequence: int) -> RankStep:
        share = Share(group="replicate over ranks 0-15", replica_index=rank, replica_count=16)
        row = gradient_row(sum_squares=0.1, elements=4.0)
        return rank_step(rank, make_record(sequence, VALUES, [row]), share)

    node = SimNode(1, range(8, 16), 16, ddp)
    idle = len(encode_report(node.report()))
    for _ in range(10):
        node.write()

    assert idle < 1_000
    assert (len(encode_report(node.report())) - idle) / 10 < 500
