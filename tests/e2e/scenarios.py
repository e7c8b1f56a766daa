"""What each job must bring, written down before it runs: its alerts and no others.

From the conditions' thresholds and guards:

* explosion: FP32, so nothing overflows; the norm passes 100 and 1000 while loss and gradients
  stay finite. The milder severity of the same condition fires as well and is muted.
  The loss leaves its usual level as well, long before it is a finite number no more, and does not
  come back: what was learned is lost.
* overflow storm: begins after calibration, so that the conditions which wait for it judge it. The
  forward pass itself overflows, so the loss is not finite on three skipped steps in a row and
  more, nor are the gradients; no scale helps, so the scale falls through 128 to its floor, never
  raised, and far below where it began. No step is applied, so nothing explodes and no update is
  non-finite.
* non-finite update: without a scaler nothing is skipped; from the NaN on every loss is NaN. It
  began with the loss of rank 1 alone, so that rank is named.
* exception, kill: the run ended other than by completion; its end was seen, so it did not vanish.
* calibrating, which is healthy from then on, and brief: nothing.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One job of tests/e2e/job.py."""

    name: str
    alerts: Mapping[str, str] = field(default_factory=dict)
    """Name of each alert to its worst severity."""
    labels: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Labels that an alert must carry."""
    arguments: tuple[str, ...] = ()
    killed: bool = False
    """Whether all ranks are killed by SIGKILL in the middle."""
    completes: bool = True
    """Whether torchrun ends with 0."""
    nodes: int = 1
    """All on this machine, each with a node agent of its own."""


SCENARIOS = (
    Scenario(
        name="overflow-storm",
        alerts={
            "MpAgentOverflowRatioHigh": "critical",
            "MpAgentLossScaleLowAndFalling": "warning",
            "MpAgentLossScaleConsecutiveDecreases": "warning",
            "MpAgentLossScaleFarBelowInitial": "critical",
            "MpAgentLossScaleAtFloor": "critical",
            "MpAgentLossNonFinite": "critical",
            "MpAgentGradientNonFinite": "critical",
        },
    ),
    Scenario(name="calibrating"),
    Scenario(
        name="explosion",
        alerts={
            "MpAgentGradientExplosion": "critical",
            "MpAgentLossSpike": "warning",
            "MpAgentLossDiverging": "critical",
        },
    ),
    Scenario(
        name="non-finite-update",
        alerts={
            "MpAgentNonFiniteUpdate": "critical",
            "MpAgentLossNonFinite": "critical",
            "MpAgentRankNonFinite": "critical",
        },
    ),
    Scenario(
        name="exception",
        alerts={"MpAgentRunFailed": "critical"},
        labels={"MpAgentRunFailed": {"reason": "failed"}},
        completes=False,
    ),
    Scenario(
        name="kill",
        arguments=("healthy",),
        alerts={"MpAgentRunFailed": "critical"},
        labels={"MpAgentRunFailed": {"reason": "killed"}},
        killed=True,
        completes=False,
    ),
    Scenario(name="brief"),
)
"""The longest first: they run several at a time."""

BY_NAME = {scenario.name: scenario for scenario in SCENARIOS}
