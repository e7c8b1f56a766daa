"""Examples of MpAgentNothingTrained."""

from mp_agent.alerting.conditions.gradient_layers import _NOTHING_TRAINED_TEXT
from mp_agent.alerting.expressions import metrics
from mp_agent.alerting.severity import Severity
from tests.alerting.examples.example import Example, Examples, Track, flat, ramp


def _example(title: str, reason: str, severity: Severity) -> Example:
    text = _NOTHING_TRAINED_TEXT.replace("{run}", "demo").replace("{reason}", reason)
    counts = (*flat(None, 5), *ramp(60, 60, 30), "stale")
    certain = severity is Severity.CRITICAL
    return Example(
        title=title,
        minutes=40,
        tracks=(Track(metrics.UNTRAINED_STEPS, counts, {"reason": reason}),),
        fires={severity: text.replace("{value|count}", "1800")},
        labels={"reason": reason},
        at=34,
        not_yet=(5 if certain else 7, 40),
    )


_ZEROS = _example(
    "a loss and gradients that are exactly 0 at every step", "all gradients 0", Severity.CRITICAL
)

_ZERO_LOSS = _example(
    "a loss of exactly 0 whose gradients are not finite",
    "loss 0 with non-finite gradients",
    Severity.CRITICAL,
)

_ZERO_RATE = _example(
    "a learning rate that has decayed to 0 while steps go on", "learning rate 0", Severity.WARNING
)

_CONSTANT = _example("a loss that is the same on every step", "constant loss", Severity.WARNING)

_NO_GRADIENTS = _example("optimizer steps without any gradient", "no gradients", Severity.WARNING)

_VANISHED = _example(
    "a loss that was above 0 and is exactly 0 on every step", "loss 0", Severity.WARNING
)

_SAME = _example(
    "a loss and a gradient norm that are the same on every step",
    "constant loss and gradient norm",
    Severity.WARNING,
)

_FEW = Example(
    title="a few steps at learning rate 0, as at both ends of a schedule",
    minutes=12,
    tracks=(
        Track(metrics.UNTRAINED_STEPS, (1, 2, 3, "stale"), {"reason": "learning rate 0"}),
        Track(metrics.UNTRAINED_STEPS, (1, 2, 3, "stale"), {"reason": "all gradients 0"}),
    ),
)

_ROUNDED = Example(
    title="a rounded loss that is constant for some time",
    minutes=30,
    tracks=(
        Track(metrics.UNTRAINED_STEPS, (*ramp(10, 16, 29), "stale"), {"reason": "constant loss"}),
    ),
)

EXAMPLES = {
    "MpAgentNothingTrained": Examples(
        firing=(_ZEROS, _ZERO_LOSS, _ZERO_RATE, _CONSTANT, _NO_GRADIENTS, _VANISHED, _SAME),
        quiet=(_FEW, _ROUNDED),
    ),
}
