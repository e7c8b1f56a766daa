"""Leads are counted in steps of a record that the shipped conditions judge."""

from dataclasses import replace
from math import nan
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.early_warning.causes import BY_NAME, CAUSES, Recipe, warmed_up
from benchmarks.early_warning.judging import CONDITIONS, LOSS_BASED, SIGNALS, Verdict, judge
from benchmarks.early_warning.language import TransformerTask, Variant
from benchmarks.early_warning.leads import (
    Pair,
    any_signal,
    critical_delays,
    doubled_step,
    left_step,
    reach_of,
    reaches,
)
from benchmarks.early_warning.table import BEGIN, END, tables, write
from benchmarks.early_warning.training import LAYER_INTERVAL, train
from mp_agent.records.columns import GRADIENTS, OPTIMIZER
from mp_agent.records.schema import family_columns
from tests.agent.flight.builders import make_log, make_segment
from tests.subtests import each

RATE, LOSS = "MpAgentLearningRateJump", "MpAgentLossNonFinite"
STALE, SPIKE = "MpAgentSecondMomentStale", "MpAgentLossSpike"


def pair(faulty, healthy=None, *, left=150, critical=None, twin_critical=None, **options):
    known = {"cause": "attention_logits", "seed": 0, "twin": "healthy_no_qk_norm", "steps": 300}
    return Pair(
        **{**known, **options},
        faulty=Verdict(faulty, critical or {}),
        healthy=Verdict(healthy or {}, twin_critical or {}),
        left_step=left,
        faulty_loss=2.0,
        healthy_loss=1.0,
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
    assert 120 < verdict.fired[STALE] <= 123
    assert verdict.fired[LOSS] == verdict.loss_step == verdict.critical_step == 150
    assert LOSS in verdict.critical and STALE not in verdict.critical


def test_a_healthy_record_fires_nothing():
    assert judge(make_log(segments=(learning(150, learning_rate=1e-3),))) == Verdict({})


def test_signals_are_all_conditions_of_numbers_but_those_of_the_loss():
    assert set(SIGNALS) | set(LOSS_BASED) == set(CONDITIONS)
    assert not set(SIGNALS) & set(LOSS_BASED)
    assert {STALE, RATE} <= set(SIGNALS) and "MpAgentRunStalled" not in CONDITIONS


def test_a_lead_counts_to_where_the_loss_left_its_course_and_may_be_negative():
    pairs = [
        pair({STALE: 100, LOSS: 230}, left=111),
        pair({STALE: 150, LOSS: 151}),
        pair({STALE: 170}),
        pair({LOSS: 150}),
        pair({STALE: 90}, left=None),
    ]
    found = reach_of(STALE, pairs)
    assert found.leads == (11, 0, -20)
    assert found.leads_to_condition == (130, 1)
    assert (found.median_lead, found.unmoved) == (0, 1)
    assert (found.warned, found.wrong) == (1, 4)
    assert found.recall == 0.75
    assert not found.only_late and reach_of(STALE, pairs[1:]).only_late


def test_what_fires_in_the_twin_too_says_nothing():
    found = any_signal([pair({STALE: 100, RATE: 130}, {STALE: 120})])
    assert found.leads == (20,)
    assert (found.false_alarms, found.healthy) == (1, 1)


def test_the_first_signal_counts_whichever_it_is_and_no_condition_of_the_loss_is_one():
    found = any_signal([pair({STALE: 140, RATE: 120, LOSS: 90}), pair({SPIKE: 12})])
    assert found.leads == (30,)
    assert found.recall == 0.5


def test_a_twin_that_several_causes_share_counts_once():
    shared = [pair({}, {STALE: 5}), pair({}, {STALE: 5}, cause="output_logits")]
    other = pair({}, {LOSS: 9}, seed=1, twin_critical={LOSS: 9})
    assert reach_of(STALE, shared).false_alarms == 1
    found = any_signal([*shared, other])
    assert (found.false_alarms, found.false_critical, found.healthy) == (2, 1, 2)
    assert len(reaches(shared)) == len(CONDITIONS)


FLAT = [2.0] * 60


@each(
    ("losses", "step"),
    [
        (FLAT, None),
        # The median of ten steps is above from the sixth of them on.
        ([2.0] * 30 + [2.3] * 30, 36),
        ([2.0] * 30 + [2.1] * 30, None),
        ([2.0] * 30 + [9.0] * 20 + [2.0] * 10, None),
        ([2.0] * 30 + [nan] * 30, 31),
        ([2.0, *[nan] * 59], 2),
        # It is below its twin, and above its own best.
        ([2.0] * 20 + [1.0] * 10 + [1.5] * 30, 35),
    ],
)
def test_a_loss_leaves_its_course_where_it_stays_above_its_best_or_its_twin(losses, step):
    assert left_step(losses, FLAT) == step


def test_a_loss_that_never_falls_or_stops_falling_leaves_the_course_of_its_twin():
    falling = [4.0 - 0.02 * step for step in range(60)]
    never = left_step([4.0] * 60, falling)
    stuck = left_step([max(loss, 3.5) for loss in falling], falling)
    assert never is not None and 20 < never < 30
    assert stuck is not None and 35 < stuck < 60
    assert left_step(falling, falling) is None


@pytest.mark.parametrize(
    ("losses", "step"),
    [
        ([2.0] * 30 + [3.9] * 30, None),
        ([2.0] * 30 + [4.1] * 30, 36),
        ([2.0] * 30 + [4.1] * 20 + [2.0] * 10, None),
        ([2.0] * 30 + [nan] * 30, 31),
        ([-1.0] * 30 + [5.0] * 30, None),
    ],
)
def test_a_loss_has_doubled_where_it_stays_at_twice_its_best(losses, step):
    assert doubled_step(losses) == step


def test_the_delay_of_a_critical_condition_counts_from_the_doubling():
    pairs = [
        pair({SPIKE: 110}, critical={LOSS: 125, RATE: 130}, doubled_step=100),
        pair({SPIKE: 110}, doubled_step=100),
        pair({SPIKE: 110}, doubled_step=280),
        pair({SPIKE: 110}, critical={LOSS: 125}),
    ]
    assert critical_delays(pairs) == [25, None]


def test_a_page_is_rewritten_between_its_marks(tmp_path: Path):
    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    late = pair({RATE: 160, LOSS: 170}, {STALE: 5}, cause="bad_shard", twin="healthy_bf16")
    text = tables([pair({STALE: 120, LOSS: 150}), late])
    write(text, page)
    content = page.read_text()
    assert content.startswith(f"before\n{BEGIN}\n") and content.endswith(f"{END}\nafter\n")
    assert "old" not in content
    assert "| MpAgentSecondMomentStale | 30 | 30 | 1 of 2 | 1 of 2 | 0 | 1 of 2 | 0 |" in content
    assert "10 steps (-10 to 30); aimed at 20 or more: **not reached**" in content
    assert "Of the held-out causes: -10 (-10 to -10)" in content
    assert f"so an effect here: {RATE}." in content
    page.write_text("no marks")
    with pytest.raises(ValueError, match=r"page\.md: has no"):
        write(text, page)


def test_causes_are_many_and_some_are_held_out():
    assert len(BY_NAME) == len(CAUSES) >= 12
    assert sum(cause.held_out for cause in CAUSES) >= 4


@pytest.mark.slow
def test_a_training_that_overflows_and_one_that_does_not_go_through():
    steps = 3 * LAYER_INTERVAL

    def overflowing(seed):
        half = Variant(stream_dtype=torch.float16)
        return TransformerTask(seed, half, gain=lambda step: 1e6)

    def usual(seed):
        return TransformerTask(seed, Variant())

    rate = warmed_up(2e-3)
    faulty = train(Recipe(name="faulty", task=overflowing, rate=rate, scaled=True), 0, steps)
    healthy = train(Recipe(name="healthy", task=usual, rate=rate), 0, steps)

    assert len(faulty.losses) == len(healthy.losses) == len(healthy.seen) == steps
    assert healthy.parameters > 1e6
    written = [step for segment in healthy.rank.segments for step in segment.steps]
    assert [step.sequence for step in written] == list(range(1, steps + 1))
    assert {LOSS, "MpAgentActivationNonFinite"} <= judge(faulty.rank).critical.keys()
    assert judge(healthy.rank) == Verdict({})
    assert left_step(faulty.losses, healthy.losses) is not None
