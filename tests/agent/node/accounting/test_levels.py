"""Levels that change early: a loss that is back where it began, a norm that grows many times."""

from collections.abc import Callable, Sequence
from math import exp
from random import Random

import pytest

from mp_agent.catalog.thresholds import resolve
from mp_agent.node.accounting.progress import Progress
from mp_agent.node.accounting.tracker import AccountContext
from mp_agent.records.columns import GRADIENTS
from mp_agent.records.merged import MergedStep, OptimizerStep

THRESHOLDS = resolve({})


def fold(
    losses: Sequence[float] = (),
    *,
    norms: Sequence[float] = (),
    rate: Callable[[int], float] = lambda step: 1e-3,
    other_model: bool = False,
) -> tuple[int, int]:
    """Return the first steps on which the loss was back, and the norm had grown; 0 for none."""
    progress, back, grown = Progress(), 0, 0
    context = AccountContext(THRESHOLDS, 600.0, progress)
    other = OptimizerStep(sequence=1, families={}, complete=frozenset())
    for step in range(1, max(len(losses), len(norms)) + 1):
        norm = norms[step - 1] if norms else 1.0
        merged = MergedStep(
            sequence=step,
            step=step,
            time_unix_seconds=float(step),
            columns={"loss": losses[step - 1] if losses else 1.0, "learning_rate": rate(step)},
            world_size=1,
            present_ranks=frozenset({0}),
            families={
                GRADIENTS.name: {
                    "sum_squares": norm * norm,
                    "elements": 9.0,
                    **dict.fromkeys(GRADIENTS.nonfinite, 0.0),
                }
            },
            complete=frozenset({GRADIENTS.name}),
            optimizers={"1": other} if other_model else {},
        )
        for tracker in progress.trackers:
            tracker.observe(merged, context)
        back = back or (step if progress.relapse.steps else 0)
        growth = progress.norm_growth.growth
        grown = grown or (step if growth >= THRESHOLDS["grad_norm_usual_growth"] else 0)
    return back, grown


def falling(steps: int, *, within: float = 40.0) -> list[float]:
    random = Random(1)
    return [1.6 + 3.0 * exp(-step / within) + random.gauss(0, 0.08) for step in range(steps)]


def at(level: float, steps: int) -> list[float]:
    random = Random(2)
    return [level + random.gauss(0, 0.1) for _ in range(steps)]


@pytest.mark.parametrize("lost_at", [160, 250, 400])
def test_a_loss_back_at_its_beginning_is_found_within_64_steps(lost_at):
    back, _ = fold(falling(lost_at) + at(4.5, 100))
    assert lost_at < back <= lost_at + 64


@pytest.mark.parametrize(
    "losses",
    [
        falling(500),
        falling(250) + at(3.0, 200),
        falling(250) + at(4.5, 16) + falling(200, within=20.0),
        falling(250) + [1.6 + 3.0 * step / 200 for step in range(200)] + at(4.6, 100),
        at(4.6, 400),
    ],
    ids=["falls", "half-way back", "recovers", "rises slowly", "never falls"],
)
def test_other_losses_are_not_back(losses):
    assert fold(losses)[0] == 0


def test_a_loss_of_models_that_are_trained_in_turn_is_not_judged():
    assert fold(falling(250) + at(4.5, 200), other_model=True)[0] == 0


def norms(grown_at: int, factor: float, steps: int = 400) -> list[float]:
    random = Random(3)
    return [
        0.5 * exp(random.gauss(0, 0.3)) * (factor if step >= grown_at else 1.0)
        for step in range(steps)
    ]


def test_a_norm_forty_times_the_usual_one_is_found_within_64_steps():
    _, grown = fold(norms=norms(203, 40.0))
    assert 203 < grown <= 203 + 64


def test_a_norm_that_grows_less_or_with_the_rate_or_from_a_low_is_not():
    assert fold(norms=norms(203, 10.0))[1] == 0
    assert fold(norms=norms(203, 40.0), rate=lambda step: 1e-2 if step > 200 else 1e-3)[1] == 0
    low = norms(0, 1.0, 100) + [norm / 50 for norm in norms(0, 1.0, 100)] + norms(0, 1.0, 100)
    assert fold(norms=low)[1] == 0
    assert fold(norms=norms(203, 40.0), other_model=True)[1] == 0
