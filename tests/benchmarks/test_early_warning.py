"""Leads are counted in steps of a record that the shipped conditions judge."""

from dataclasses import replace
from math import nan
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.early_warning.causes import Recipe
from benchmarks.early_warning.judging import CONDITIONS, LOSS_BASED, SIGNALS, Verdict, judge
from benchmarks.early_warning.leads import (
    Pair,
    any_signal,
    last_loss,
    left_step,
    reach_of,
    reaches,
)
from benchmarks.early_warning.model import Variant
from benchmarks.early_warning.table import BEGIN, END, tables, write
from benchmarks.early_warning.training import LAYER_INTERVAL, train
from mp_agent.records.columns import GRADIENTS, OPTIMIZER
from mp_agent.records.schema import family_columns
from tests.agent.flight.builders import make_log, make_segment

RATE, LOSS = "MpAgentLearningRateJump", "MpAgentLossNonFinite"
STALE, SPIKE = "MpAgentSecondMomentStale", "MpAgentLossSpike"


def pair(faulty, healthy=None, *, critical=(), loss=2.0, twin=1.0):
    return Pair(
        "attention_logits",
        0,
        Verdict(faulty),
        Verdict(healthy or {}, frozenset(critical)),
        faulty_loss=loss,
        healthy_loss=twin,
    )


def with_stale_moments(segment, *sequences):
    """Return a segment with tables of the optimizer too; at `sequences` its moments are stale."""
    rows = {
        sequence: np.array([stale.get(name, 0.0) for name in OPTIMIZER.names])
        for sequence in (table.sequence for table in segment.tables)
        for ratio in (9.0 if sequence in sequences else 1.0,)
        for stale in ({"elements": 1e3, "active_elements": 1e3, "squared_ratio_sum": 1e3 * ratio},)
    }
    return replace(
        segment,
        schema=replace(segment.schema, families=family_columns((GRADIENTS, OPTIMIZER))),
        steps=tuple(
            replace(step, families={**step.families, OPTIMIZER.name: rows[step.sequence][None, :]})
            if step.sequence in rows
            else step
            for step in segment.steps
        ),
        tables=tuple(
            replace(
                table,
                families={**table.families, OPTIMIZER.name: np.stack([rows[table.sequence]] * 2)},
            )
            for table in segment.tables
        ),
    )


def learning(steps, **options):
    """Return a segment whose loss scatters a little, as that of a model that learns."""
    whole = make_segment(steps, **options)
    scattered = (
        make_segment(1, first=step.sequence, **{"loss": 2.0 + step.sequence % 5 / 50, **options_of})
        for step in whole.steps
        for options_of in ({key: options[key] for key in options if key != "tables"},)
    )
    return replace(whole, steps=tuple(step for each in scattered for step in each.steps))


def test_a_record_is_judged_to_within_three_steps():
    rank = make_log(
        segments=(
            with_stale_moments(learning(149, tables=(100, 110, 120, 130)), 110, 120),
            make_segment(10, first=150, loss=nan, loss_nonfinite=1.0),
        )
    )
    verdict = judge(rank)
    # While nothing holds, a backtest judges every 25 s, which is every third step here.
    assert verdict.fired[STALE] == verdict.first_signal_step
    assert 120 < verdict.fired[STALE] <= 123
    assert verdict.fired[LOSS] == verdict.loss_step == 150
    assert LOSS in verdict.critical and STALE not in verdict.critical
    assert reach_of(STALE, [pair(verdict.fired)]).leads == (150 - verdict.fired[STALE],)


def test_a_healthy_record_fires_nothing():
    assert judge(make_log(segments=(learning(150, learning_rate=1e-3),))) == Verdict({})


def test_signals_are_all_conditions_of_numbers_but_those_of_the_loss():
    assert set(SIGNALS) | set(LOSS_BASED) == set(CONDITIONS)
    assert not set(SIGNALS) & set(LOSS_BASED)
    assert {STALE, RATE} <= set(SIGNALS) and "MpAgentRunStalled" not in CONDITIONS


def test_only_a_signal_before_the_loss_is_a_warning():
    pairs = [
        pair({STALE: 100, LOSS: 150}),
        pair({STALE: 150, LOSS: 150}),
        pair({STALE: 170, LOSS: 200, SPIKE: 160}),
        pair({LOSS: 150}),
        pair({STALE: 90}),
    ]
    found = reach_of(STALE, pairs)
    assert found.leads == (50, 0, -10)
    assert found.median_lead == 0
    assert found.alone == 1
    assert (found.warned, found.wrong) == (2, 5)
    assert found.recall == 0.4


def test_the_lead_to_the_loss_itself_is_distinguished_from_that_to_its_condition():
    late = replace(pair({STALE: 100, LOSS: 230}), left_step=111)
    never = pair({STALE: 100, LOSS: 230})
    found = reach_of(STALE, [late, never])
    assert (found.leads, found.leads_to_loss) == ((130, 130), (11,))
    assert found.median_lead_to_loss == 11
    text = tables([late])
    assert "to a condition of the loss: 130 steps; to the loss itself: 11;" in text
    assert "aimed at 20 or more of the latter: **not reached**" in text


@pytest.mark.parametrize(
    ("losses", "step"),
    [
        ([2.0] * 60, None),
        # The median of ten steps is above from the sixth of them on.
        ([2.0] * 30 + [2.3] * 30, 36),
        ([2.0] * 30 + [2.1] * 30, None),
        ([2.0] * 30 + [9.0] * 20 + [2.0] * 10, None),
        ([2.0] * 30 + [nan] * 30, 31),
        ([4.0 - 0.02 * step for step in range(60)], 10),
    ],
)
def test_a_loss_leaves_its_course_where_it_stays_above_its_best_or_its_twin(losses, step):
    twin = [2.0] * 60
    assert left_step(losses, twin) == step


def test_a_loss_that_merely_stops_falling_leaves_the_course_of_its_twin():
    falling = [4.0 - 0.02 * step for step in range(60)]
    stuck = [max(loss, 3.5) for loss in falling]
    left = left_step(stuck, falling)
    assert left is not None and 35 < left < 60
    assert left_step(falling, falling) is None


def test_the_first_signal_counts_whichever_it_is():
    found = any_signal([pair({STALE: 140, RATE: 120, LOSS: 150}), pair({RATE: 10, SPIKE: 12})])
    assert found.leads == (30, 2)
    assert found.recall == 1.0


def test_a_training_that_ends_as_well_as_its_twin_did_not_go_wrong():
    pairs = [pair({STALE: 5}, loss=1.0), pair({}, loss=nan), pair({}, loss=1.2)]
    found = any_signal(pairs)
    assert (found.wrong, found.recall, found.median_lead) == (2, 0.0, None)
    assert [each.went_wrong for each in pairs] == [False, True, True]


def test_healthy_trainings_count_as_false_alarms_whether_or_not_the_other_went_wrong():
    pairs = [pair({}, {STALE: 5}, loss=1.0), pair({}, {LOSS: 9}, critical={LOSS})]
    assert reach_of(STALE, pairs).false_alarms == 1
    assert reach_of(LOSS, pairs).false_critical == 1
    found = any_signal(pairs)
    assert (found.false_alarms, found.false_critical, found.healthy) == (1, 1, 2)
    assert [each.signal for each in reaches(pairs)] == [LOSS, STALE]


def test_the_last_loss_is_lost_when_one_is():
    assert last_loss([9.0] * 50 + [1.0] * 20) == 1.0
    assert last_loss([1.0] * 69 + [float("inf")]) != last_loss([1.0])


def test_a_page_is_rewritten_between_its_marks(tmp_path: Path):
    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    text = tables([pair({STALE: 100, LOSS: 150}), pair({SPIKE: 40}, {STALE: 5})])
    write(text, page)
    content = page.read_text()
    assert content.startswith(f"before\n{BEGIN}\n") and content.endswith(f"{END}\nafter\n")
    assert "old" not in content
    assert "| MpAgentSecondMomentStale | 50 | – | 50 | 0 | 50% | 1 of 2 | 0 |" in content
    first = tmp_path / "first.md"
    write(text, first)
    assert text in first.read_text()
    page.write_text("no marks")
    with pytest.raises(ValueError, match=r"page\.md: has no"):
        write(text, page)


@pytest.mark.slow
def test_a_training_that_overflows_and_one_that_does_not_go_through():
    torch.set_num_threads(1)
    steps = 3 * LAYER_INTERVAL
    overflowing = Variant(stream_dtype=torch.float16, branch_gain=1e6)
    faulty = train(Recipe(variant=overflowing, scaled=True), 0, "faulty", steps)
    healthy = train(Recipe(), 0, "healthy", steps)

    assert len(faulty.losses) == len(healthy.losses) == steps
    written = [step for segment in healthy.rank.segments for step in segment.steps]
    assert [step.sequence for step in written] == list(range(1, steps + 1))
    verdict = judge(faulty.rank)
    assert {LOSS, "MpAgentActivationNonFinite"} <= verdict.critical
    assert judge(healthy.rank).critical == frozenset()
    found = any_signal(
        [
            Pair(
                "fp16_residual",
                0,
                verdict,
                judge(healthy.rank),
                last_loss(faulty.losses),
                last_loss(healthy.losses),
            )
        ]
    )
    assert found.wrong == 1 and found.false_critical == 0
