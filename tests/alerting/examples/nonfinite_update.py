"""Examples of MpAgentNonFiniteUpdate."""

from mp_agent.alerting.expressions import metrics
from mp_agent.alerting.severity import Severity
from tests.alerting.examples.example import Example, Examples, Track, flat, ramp


def _fires(updates: int, first: str = "") -> str:
    return (
        f"Run demo stepped its optimizer {updates} time(s) with NaN or Inf gradients in the last "
        f"<incident_window>.{first}"
    )


_WITHOUT_SCALER = Example(
    title="a NaN reaches the weights, and each step after it is non-finite too",
    minutes=26,
    tracks=(
        Track(metrics.NONFINITE_UPDATES, (*flat(0, 10), *ramp(1, 1, 3))),
        Track(metrics.LOSS_NONFINITE_STEPS, (*flat(0, 10), *ramp(1, 1, 3))),
        Track(metrics.LOSS_NONFINITE_UNSKIPPED, (*flat(0, 10), *ramp(1, 1, 3))),
        Track(metrics.GRAD_FINITE, (*flat(1, 10), 0)),
        Track(
            metrics.FIRST_NONFINITE,
            (*(None,) * 10, 1),
            {"step": "5612", "rank": "3", "layer": "blocks.4.mlp.up.weight", "phase": "forward"},
        ),
    ),
    without=(metrics.LOSS_SCALE, metrics.LOSS_SCALE_INITIAL),
    fires={
        Severity.CRITICAL: _fires(
            3,
            " First seen at step 5612, rank 3, layer blocks.4.mlp.up.weight, phase forward.",
        )
    },
    at=15,
    not_yet=(9, 25),
    also={
        "MpAgentLossNonFinite": (Severity.CRITICAL,),
        "MpAgentRankNonFinite": (Severity.CRITICAL,),
    },
)

_BORN_IN_BACKWARD = Example(
    title="a NaN from the backward pass before the first scrape, without a rank",
    age_minutes=0,
    minutes=15,
    tracks=(
        Track(metrics.NONFINITE_UPDATES, (None, None, 1)),
        Track(
            metrics.FIRST_NONFINITE,
            (None, None, 1),
            {"step": "4", "rank": "", "layer": "", "phase": "backward"},
        ),
    ),
    fires={Severity.CRITICAL: _fires(1, " First seen at step 4, phase backward.")},
    at=3,
    not_yet=(1, 14),
)

_SKIPPED = Example(
    title="an overflow that GradScaler skipped",
    minutes=20,
    tracks=(
        Track(metrics.GRAD_FINITE, (*flat(1, 10), 0, 1)),
        Track(metrics.SKIPPED_STEPS, (*flat(0, 10), 1)),
        Track(metrics.LOSS_SCALE, (*flat(65536, 10), 32768)),
        Track(metrics.LOSS_SCALE_DECREASES, (*flat(0, 10), 1)),
    ),
)

_BEFORE_FAILED_SCRAPE = Example(
    title="an incident, but not again when half an hour later a scrape fails",
    age_minutes=0,
    minutes=52,
    tracks=(
        Track(metrics.NONFINITE_UPDATES, (*flat(1, 40), "stale", *flat(1, 12))),
        Track("up", (*flat(1, 40), 0, 1)),
    ),
    fires={Severity.CRITICAL: _fires(1)},
    at=3,
    not_yet=(39, 41, 42, 50, 51, 52),
)

EXAMPLES = {
    "MpAgentNonFiniteUpdate": Examples(
        firing=(_WITHOUT_SCALER, _BORN_IN_BACKWARD, _BEFORE_FAILED_SCRAPE),
        quiet=(_SKIPPED,),
    ),
}
