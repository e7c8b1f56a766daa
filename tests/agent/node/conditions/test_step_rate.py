"""What is counted in steps has the same verdict on the same step, however long the steps take."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from mp_agent.alerting.conditions import CONDITIONS
from mp_agent.node.conditions import tracker as module
from mp_agent.records.columns import DISTRIBUTION, OPTIMIZER
from tests.agent.node.builders import merged_step
from tests.agent.node.training import HEALTHY, Training

STEP_SECONDS = (0.005, 1.0, 60.0)
JUDGED_EVERY = 5
"""Steps between two judgements, at each rate."""

OF_TIME = {
    "MpAgentCoverageLow": "ranks that do not report for some minutes",
    "MpAgentRankStalled": "a rank that is behind for some minutes",
    "MpAgentRankStraggler": "throughput that is lost for some minutes",
    "MpAgentRunFailed": "a launcher's time to restart",
    "MpAgentRunRestarting": "restarts within an hour",
    "MpAgentRunStalled": "a time without a step",
    "MpAgentRunVanished": "a time without series",
    "MpAgentTelemetryDegraded": "the health of the agent, which makes no steps",
}
"""Conditions whose thing is time, and of what."""


@dataclass(frozen=True)
class Fault:
    """A run of so many steps with a fault, and the steps on which conditions are to be found."""

    steps: int
    values: Callable[[int], Mapping[str, float]]
    """Of a step."""
    expected: Mapping[tuple[str, str], int]
    families: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Rows of every hundredth step from the 700th on, by family."""


def halved_every_60(step: int) -> Mapping[str, float]:
    """A scale that falls from 65536, and steps that are skipped, from the first step on."""
    return {"loss_scale": 65536 * 0.5 ** ((step - 1) // 60), "skipped": float(step % 60 == 0)}


def collapse(step: int) -> Mapping[str, float]:
    return {"loss_scale": 65536.0 if step < 700 else max(65536 * 0.5 ** (step - 699), 64.0)}


def storm(step: int) -> Mapping[str, float]:
    return {"loss_scale": 65536.0, "skipped": float(step > 900 and step % 5 == 0)}


def at_floor(step: int) -> Mapping[str, float]:
    return {"loss_scale": 1.0, "skipped": float(step > 600 and step % 20 == 0)}


def vanishing(step: int) -> Mapping[str, float]:
    return {"norm": 1.0 if step < 300 else 1e-8}


def exploding(step: int) -> Mapping[str, float]:
    return {"norm": 5000.0 if step == 205 else 1.0}


def rate_zero(step: int) -> Mapping[str, float]:
    return {"learning_rate": 1e-3 if step < 200 else 0.0, "loss": 2.0 + step * 5 % 7 / 100}


def lost(step: int) -> Mapping[str, float]:
    return {"loss": (2.0 if step < 400 else 9.0) + step * 5 % 7 / 100}


def bad_update(step: int) -> Mapping[str, float]:
    return {"nan_elements": float(step == 120), "norm": 1.0}


def scaler_at_work(step: int) -> Mapping[str, float]:
    """A healthy FP16 run: calibration in the first steps, then an overflow in 2000."""
    return {
        "loss_scale": max(65536 * 0.5 ** (step - 1), 16384.0) * (0.5 if step > 1800 else 1.0),
        "skipped": float(step < 5 or step == 1800),
    }


def solved(step: int) -> Mapping[str, float]:
    """Memorized data: the loss ends at 0.0, and so do the gradients."""
    loss = 2.3 * 0.98**step if step < 600 else 0.0
    return {"loss": loss, "norm": max(loss, 1e-9)}


FAULTS = {
    "one overflow in 60 steps": Fault(
        900,
        halved_every_60,
        {
            ("MpAgentLossScaleConsecutiveDecreases", "warning"): 785,
            ("MpAgentLossScaleLowAndFalling", "warning"): 720,
            ("MpAgentOverflowRatioHigh", "warning"): 840,
        },
    ),
    "a collapse of the scale": Fault(
        1400,
        collapse,
        {
            ("MpAgentLossScaleLowAndFalling", "warning"): 770,
            ("MpAgentLossScaleFarBelowInitial", "critical"): 945,
            ("MpAgentLossScaleLow", "warning"): 1305,
        },
    ),
    "every fifth step skipped": Fault(
        1600, storm, {("MpAgentOverflowRatioHigh", "critical"): 1305}
    ),
    "skips at the floor": Fault(700, at_floor, {("MpAgentLossScaleAtFloor", "critical"): 660}),
    "vanishing": Fault(
        1000,
        vanishing,
        {
            ("MpAgentGradientVanishing", "critical"): 420,
            ("MpAgentGradientVanishing", "warning"): 900,
        },
    ),
    "exploding": Fault(250, exploding, {("MpAgentGradientExplosion", "critical"): 205}),
    "learning rate 0": Fault(450, rate_zero, {("MpAgentNothingTrained", "warning"): 395}),
    "a loss that jumps": Fault(450, lost, {("MpAgentLossSpike", "warning"): 405}),
    "a non-finite update": Fault(150, bad_update, {("MpAgentNonFiniteUpdate", "critical"): 120}),
    "updates that rounding swallows": Fault(
        1100,
        lambda step: {},
        {("MpAgentUpdatesLost", "warning"): 800},
        {
            OPTIMIZER.name: {
                "weight_sum_squares": 1.0,
                "elements": 10.0,
                "lost_updates": 8.0,
                "rounded_elements": 10.0,
            }
        },
    ),
    "no loss scale that suits": Fault(
        1100,
        lambda step: {"loss_scale": 65536.0, "abs_max": 0.9},
        {("MpAgentHeadroomVanishing", "info"): 1000},
        {
            DISTRIBUTION.name: {
                "sum_squares": 1.0,
                "elements": 100.0,
                "flushed_elements": 20.0,
                "fp16_elements": 100.0,
            }
        },
    ),
    "a scale that stays reduced": Fault(
        1800,
        lambda step: {"loss_scale": 65536 * 0.5 ** min(max(step - 640, 0) // 60, 3)},
        {("MpAgentLossScaleLow", "info"): 1720},
    ),
    "a scale below the floor": Fault(
        920,
        lambda step: {"loss_scale": 65536.0 if step < 900 else 0.5},
        {("MpAgentLossScaleAtFloor", "critical"): 900},
    ),
    "a scale that begins low": Fault(1800, lambda step: {"loss_scale": 512.0}, {}),
    "a scaler at work": Fault(2600, scaler_at_work, {}),
    "a solved task": Fault(900, solved, {("MpAgentNothingTrained", "warning"): 795}),
}


@pytest.fixture(autouse=True)
def no_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Judge whenever the test asks for it, however fast it makes steps."""
    monkeypatch.setattr(module, "PROCESSOR_SHARE", 1.0)


def found(fault: Fault, step_seconds: float, directory: Path) -> dict[tuple[str, str], int]:
    """Return on which step which condition was found first, at which severity."""
    training = Training(directory)
    first: dict[tuple[str, str], int] = {}
    for sequence in range(1, fault.steps + 1):
        training.now_seconds += step_seconds
        training.sequence = sequence
        usual = {**HEALTHY, "loss": HEALTHY["loss"] + sequence * 5 % 7 / 100}
        values = {**usual, "step_seconds": step_seconds, **fault.values(sequence)}
        step = merged_step(sequence, time=training.now_seconds, **values)
        if sequence >= 700 and sequence % 100 == 0:
            families = {**step.families, **fault.families}
            step = replace(step, families=families, complete=step.complete | fault.families.keys())
        training.account.fold_step(step)
        if sequence % JUDGED_EVERY == 0:
            training.tracker.after_step(training.account, training.now_seconds, training.export)
            for active in training.tracker.active:
                first.setdefault((active.name, active.severity), sequence)
    return first


@pytest.mark.long
@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_verdict_comes_on_the_same_step_at_any_rate(fault: Fault, tmp_path: Path):
    runs = [found(fault, seconds, tmp_path / f"{seconds}") for seconds in STEP_SECONDS]
    assert runs[0] == runs[1] == runs[2], runs
    assert fault.expected.items() <= runs[0].items()
    assert fault.expected or not runs[0]
    assert "MpAgentGradientVanishing" not in {name for name, _ in runs[0]} or fault.steps == 1000


def test_only_what_is_time_is_held_in_time():
    held = {one.name for one in CONDITIONS if any(level.hold for level in one.levels)}
    assert held <= OF_TIME.keys() <= {one.name for one in CONDITIONS}
