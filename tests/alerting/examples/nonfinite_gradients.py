"""Examples of MpAgentGradientNonFinite."""

from mp_agent.alerting.expressions import metrics
from mp_agent.alerting.severity import Severity
from tests.alerting.examples.example import Example, Examples, Track, flat, ramp


def _fires(steps: int) -> str:
    return (
        f"The gradients of run demo were NaN or Inf on <nonfinite_gradients> consecutive steps, "
        f"and on {steps} step(s) since then within the last <incident_window>."
    )


_SKIPPED_BY_HAND = Example(
    title="a run without a scaler that skips each such step itself",
    minutes=26,
    tracks=(
        Track(metrics.GRAD_NONFINITE_REPEATED, (*flat(0, 10), *ramp(1, 1, 4))),
        Track(metrics.SKIPPED_STEPS, (*flat(0, 10), *ramp(3, 1, 4))),
    ),
    without=(metrics.LOSS_SCALE, metrics.LOSS_SCALE_INITIAL),
    fires={Severity.CRITICAL: _fires(4)},
    at=14,
    not_yet=(9, 25),
)

_ISOLATED = Example(
    title="isolated non-finite gradients, as in many healthy runs",
    minutes=20,
    tracks=(
        Track(metrics.SKIPPED_STEPS, (*flat(0, 5), *flat(1, 5), 2)),
        Track(metrics.GRAD_FINITE, (*flat(1, 5), 0, *flat(1, 4), 0, 1)),
    ),
)

_NAN_TO_NUM = Example(
    title="a script that replaces NaN by 0 in the gradients before each update",
    minutes=26,
    tracks=(Track(metrics.GRAD_NONFINITE_REPLACED, (*flat(0, 10), *ramp(1, 1, 4))),),
    fires={
        Severity.WARNING: "4 update(s) of run demo within the last <incident_window> used finite "
        "gradients in place of NaN or Inf that backward had made."
    },
    at=14,
    not_yet=(9, 11, 25),
)

_REPLACED_ONCE = Example(
    title="a single update with replaced gradients",
    minutes=20,
    tracks=(Track(metrics.GRAD_NONFINITE_REPLACED, (*flat(0, 5), 1)),),
)

EXAMPLES = {
    "MpAgentGradientNonFinite": Examples(
        firing=(_SKIPPED_BY_HAND, _NAN_TO_NUM),
        quiet=(_ISOLATED, _REPLACED_ONCE),
    ),
}
