"""Examples of alerts on NaN and Inf."""

from mp_agent.alerting.values import Severity
from mp_agent.catalog.metrics import activations, gradient_layers, gradients, run, training
from tests.alerting.examples.example import Example, Examples, Track, Value, flat, ramp


def _nonfinite_update_fires(updates: int, first: str = "") -> str:
    return (
        f"Run demo stepped its optimizer {updates} time(s) with NaN or Inf gradients in the last "
        f"<incident_window>.{first}"
    )


_WITHOUT_SCALER = Example(
    title="a NaN reaches the weights, and each step after it is non-finite too",
    minutes=26,
    tracks=(
        Track(gradients.NONFINITE_UPDATES, (*flat(0, 10), *ramp(1, 1, 3))),
        Track(run.LOSS_NONFINITE_STEPS, (*flat(0, 10), *ramp(1, 1, 3))),
        Track(training.LOSS_NONFINITE_UNSKIPPED, (*flat(0, 10), *ramp(1, 1, 3))),
        Track(gradients.GRAD_FINITE, (*flat(1, 10), 0)),
        Track(
            run.FIRST_NONFINITE,
            (*(None,) * 10, 1),
            {"step": "5612", "rank": "3", "layer": "blocks.4.mlp.up.weight", "phase": "forward"},
        ),
    ),
    without=(training.LOSS_SCALE, training.LOSS_SCALE_INITIAL),
    fires={
        Severity.CRITICAL: _nonfinite_update_fires(
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
        Track(gradients.NONFINITE_UPDATES, (None, None, 1)),
        Track(
            run.FIRST_NONFINITE,
            (None, None, 1),
            {"step": "4", "rank": "", "layer": "", "phase": "backward"},
        ),
    ),
    fires={Severity.CRITICAL: _nonfinite_update_fires(1, " First seen at step 4, phase backward.")},
    at=3,
    not_yet=(1, 14),
)

_SKIPPED = Example(
    title="an overflow that GradScaler skipped",
    minutes=20,
    tracks=(
        Track(gradients.GRAD_FINITE, (*flat(1, 10), 0, 1)),
        Track(training.SKIPPED_STEPS, (*flat(0, 10), 1)),
        Track(training.LOSS_SCALE, (*flat(65536, 10), 32768)),
        Track(training.LOSS_SCALE_DECREASES, (*flat(0, 10), 1)),
    ),
)

_BEFORE_FAILED_SCRAPE = Example(
    title="an incident, but not again when half an hour later a scrape fails",
    age_minutes=0,
    minutes=52,
    tracks=(
        Track(gradients.NONFINITE_UPDATES, (*flat(1, 40), "stale", *flat(1, 12))),
        Track("up", (*flat(1, 40), 0, 1)),
    ),
    fires={Severity.CRITICAL: _nonfinite_update_fires(1)},
    at=3,
    not_yet=(39, 41, 42, 50, 51, 52),
)


def _nonfinite_gradients_fires(steps: int) -> str:
    return (
        f"The gradients of run demo were NaN or Inf on <nonfinite_gradients> consecutive steps, "
        f"and on {steps} step(s) since then within the last <incident_window>."
    )


_SKIPPED_BY_HAND = Example(
    title="a run without a scaler that skips each such step itself",
    minutes=26,
    tracks=(
        Track(training.GRAD_NONFINITE_REPEATED, (*flat(0, 10), *ramp(1, 1, 4))),
        Track(training.SKIPPED_STEPS, (*flat(0, 10), *ramp(3, 1, 4))),
    ),
    without=(training.LOSS_SCALE, training.LOSS_SCALE_INITIAL),
    fires={Severity.CRITICAL: _nonfinite_gradients_fires(4)},
    at=14,
    not_yet=(9, 25),
)

_ISOLATED = Example(
    title="isolated non-finite gradients, as in many healthy runs",
    minutes=20,
    tracks=(
        Track(training.SKIPPED_STEPS, (*flat(0, 5), *flat(1, 5), 2)),
        Track(gradients.GRAD_FINITE, (*flat(1, 5), 0, *flat(1, 4), 0, 1)),
    ),
)

_NAN_TO_NUM = Example(
    title="a script that replaces NaN by 0 in the gradients before each update",
    minutes=26,
    tracks=(Track(training.GRAD_NONFINITE_REPLACED, (*flat(0, 10), *ramp(1, 1, 4))),),
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
    tracks=(Track(training.GRAD_NONFINITE_REPLACED, (*flat(0, 5), 1)),),
)


_EVERY_STEP = Example(
    title="clipping that comes before unscale_ at every step",
    minutes=20,
    tracks=(Track(gradient_layers.CLIP_SCALED_STEPS, (*flat(0, 5), *ramp(60, 60, 8), 0)),),
    fires={
        Severity.WARNING: "Run demo clips gradients that are still multiplied by the loss "
        "scale, on 360 consecutive steps."
    },
    at=10,
    not_yet=(4, 14),
)

_FEW = Example(
    title="a few steps whose norm has that value by chance",
    minutes=12,
    tracks=(Track(gradient_layers.CLIP_SCALED_STEPS, (0, 3, 0, 2, 0)),),
)


def _loss_nonfinite_fires(steps: int) -> str:
    return f"The loss of run demo was NaN or Inf on {steps} recent step(s)."


_ONE_UNSKIPPED = Example(
    title="one NaN loss on a step that was not skipped",
    minutes=26,
    tracks=(
        Track(run.LOSS_NONFINITE_STEPS, (*flat(0, 10), 1)),
        Track(training.LOSS_NONFINITE_UNSKIPPED, (*flat(0, 10), 1)),
    ),
    fires={Severity.CRITICAL: _loss_nonfinite_fires(1)},
    at=12,
    not_yet=(9, 25),
)

_BORN = Example(
    title="NaN losses before the first scrape",
    age_minutes=0,
    minutes=16,
    tracks=(
        Track(run.LOSS_NONFINITE_STEPS, (None, None, 5)),
        Track(training.LOSS_NONFINITE_UNSKIPPED, (None, None, 5)),
    ),
    fires={Severity.CRITICAL: _loss_nonfinite_fires(5)},
    at=2,
    not_yet=(1, 15),
)

_THREE_SKIPPED = Example(
    title="the third consecutive skipped step with an Inf loss",
    minutes=26,
    tracks=(
        Track(run.LOSS_NONFINITE_STEPS, (*flat(0, 10), *ramp(1, 1, 3))),
        Track(training.LOSS_NONFINITE_REPEATED, (*flat(0, 12), 1)),
        Track(training.SKIPPED_STEPS, (*flat(0, 10), *ramp(1, 1, 3))),
        Track(training.LOSS_SCALE, (*flat(65536, 10), 32768, 16384, 8192, 16384)),
        Track(training.LOSS_SCALE_DECREASES, (*flat(0, 10), *ramp(1, 1, 3))),
    ),
    fires={Severity.CRITICAL: _loss_nonfinite_fires(1)},
    at=13,
    not_yet=(11, 25),
)

_ONE_IN_CALIBRATION = Example(
    title="one overflowed forward pass during calibration",
    minutes=20,
    tracks=(
        Track(run.LOSS_NONFINITE_STEPS, (0, 0, 1)),
        Track(training.SKIPPED_STEPS, (0, 1, 2)),
        Track(training.LOSS_SCALE, (65536, 32768, 16384)),
        Track(training.LOSS_SCALE_DECREASES, (0, 1, 2)),
        Track(run.STEP, ramp(0, 20, 21)),
        Track(run.STEPS, ramp(0, 20, 21)),
    ),
)

_HEALTHY_SKIPS = Example(
    title="overflows whose loss was finite",
    minutes=20,
    tracks=(Track(training.SKIPPED_STEPS, (*flat(0, 10), 1, 2)),),
)


def _first(rank: str, values: tuple[Value, ...], phase: str = "forward") -> Track:
    labels = {"step": "5612", "rank": rank, "layer": "", "phase": phase}
    return Track(run.FIRST_NONFINITE, values, labels)


def _losses(*values: Value) -> Track:
    return Track(run.LOSS_NONFINITE_STEPS, values)


_FROM_TEN: tuple[Value, ...] = (*flat(None, 10), 1)

_ONE_RANK = Example(
    title="one rank's own loss is not finite, and half an hour later a loss that is not a new "
    "incident",
    minutes=50,
    tracks=(_first("3", _FROM_TEN), _losses(*flat(0, 10), *flat(1, 30), 2)),
    fires={
        Severity.CRITICAL: "Rank 3 of run demo had the first NaN or Inf, at step 5612, before "
        "the gradient reduction."
    },
    labels={"rank": "3", "step": "5612"},
    at=15,
    not_yet=(9, 25, 45),
)

_IN_BACKWARD = Example(
    title="one rank's own gradients are not finite, and then the loss of all",
    minutes=20,
    tracks=(
        _first("3", _FROM_TEN, "backward"),
        _losses(*flat(0, 11), 1),
    ),
    fires={
        Severity.CRITICAL: "Rank 3 of run demo had the first NaN or Inf, at step 5612, before "
        "the gradient reduction."
    },
    labels={"rank": "3", "step": "5612"},
    at=15,
    not_yet=(9,),
)

_AFTER_FAILED_SCRAPE = Example(
    title="an incident of half an hour ago, when a scrape fails",
    age_minutes=0,
    minutes=52,
    tracks=(
        _first("3", (*flat(1, 40), "stale", 1)),
        _losses(*flat(1, 40), "stale", 1),
        Track("up", (*flat(1, 40), 0, 1)),
    ),
    fires={
        Severity.CRITICAL: "Rank 3 of run demo had the first NaN or Inf, at step 5612, before "
        "the gradient reduction."
    },
    labels={"rank": "3", "step": "5612"},
    at=5,
    not_yet=(39, 41, 45, 52),
)

_SEEN_LATE = Example(
    title="an incident of hours ago, seen by a Prometheus that starts empty",
    minutes=15,
    tracks=(_first("3", (1,)), _losses(7)),
)

_NO_RANK = Example(
    title="a value from the backward pass, or on all ranks, which names no rank",
    minutes=20,
    tracks=(_first("", _FROM_TEN), _losses(*flat(0, 10), 1)),
)

_WORLD_OF_ONE = Example(
    title="a run with a single rank, where naming it has no value",
    minutes=20,
    tracks=(
        _first("0", _FROM_TEN),
        _losses(*flat(0, 10), 1),
        Track(run.RUN_INFO, (1,), {"world_size": "1"}),
    ),
    without=(run.RUN_INFO,),
)


_ONE_MODULE = Example(
    title="a module returns Inf on one sampled step",
    minutes=26,
    tracks=(
        Track(activations.ACTIVATION_NONFINITE, (*flat(0, 10), 12)),
        Track(
            activations.FIRST_NONFINITE_OUTPUT,
            (*flat(None, 10), 1),
            {"step": "5600", "layer": "blocks.4.mlp.up"},
        ),
    ),
    fires={
        Severity.CRITICAL: "Modules of run demo returned 12 NaN or Inf element(s) on the steps "
        "that were sampled in the last <incident_window>. First at step 5600, layer "
        "blocks.4.mlp.up."
    },
    at=15,
    not_yet=(9, 25),
)

_NEAR = Example(
    title="outputs close to the largest number of FP16",
    minutes=15,
    tracks=(Track(activations.ACTIVATION_NONFINITE, (0,)),),
)

_OFF = Example(
    title="a run that does not measure outputs",
    minutes=15,
    without=(activations.ACTIVATION_NONFINITE,),
)


EXAMPLES = {
    "MpAgentNonFiniteUpdate": Examples(
        firing=(_WITHOUT_SCALER, _BORN_IN_BACKWARD, _BEFORE_FAILED_SCRAPE),
        quiet=(_SKIPPED,),
    ),
    "MpAgentGradientNonFinite": Examples(
        firing=(_SKIPPED_BY_HAND, _NAN_TO_NUM),
        quiet=(_ISOLATED, _REPLACED_ONCE),
    ),
    "MpAgentClippingBeforeUnscale": Examples(
        firing=(_EVERY_STEP,),
        quiet=(_FEW,),
    ),
    "MpAgentLossNonFinite": Examples(
        firing=(_ONE_UNSKIPPED, _BORN, _THREE_SKIPPED),
        quiet=(_ONE_IN_CALIBRATION, _HEALTHY_SKIPS),
    ),
    "MpAgentRankNonFinite": Examples(
        firing=(_ONE_RANK, _IN_BACKWARD, _AFTER_FAILED_SCRAPE),
        quiet=(_SEEN_LATE, _NO_RANK, _WORLD_OF_ONE),
    ),
    "MpAgentActivationNonFinite": Examples(
        firing=(_ONE_MODULE,),
        quiet=(_NEAR, _OFF),
    ),
}
