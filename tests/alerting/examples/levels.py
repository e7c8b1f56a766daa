"""Examples of alerts on levels of the loss and the gradient norm that change early in a run."""

from mp_agent.alerting.values import Severity
from mp_agent.catalog.metrics import gradient_layers, run, training
from tests.alerting.examples.example import Example, Examples, Track, flat

_BACK = Example(
    title="a loss that fell to a third and is back within some steps",
    minutes=18,
    tracks=(
        Track(run.LOSS, (4.6, 2.0, 1.6, 4.5)),
        Track(training.LOSS_RELAPSED_STEPS, (*flat(0, 3), 32, 200, 0)),
    ),
    fires={
        Severity.WARNING: "The loss of run demo has been back at its initial level for 200 steps, "
        "after it had fallen to half of it or less."
    },
    at=4,
    not_yet=(2, 17),
)

_RELAPSED_OUTLASTED = Example(
    title="a loss that was back for some minutes, directly afterwards",
    minutes=10,
    tracks=(Track(training.LOSS_RELAPSED_STEPS, (*flat(0, 3), 32, 200, 0)),),
    fires={
        Severity.WARNING: "The loss of run demo has been back at its initial level for 200 steps, "
        "after it had fallen to half of it or less."
    },
    at=10,
)

_SLOWLY = Example(
    title="a loss that rises slowly",
    minutes=6,
    tracks=(Track(run.LOSS, (1.0, 1.1, 1.2)), Track(training.LOSS_RELAPSED_STEPS, (0,))),
)

_GROWN = Example(
    title="a norm that is forty times as large as at its lowest",
    minutes=18,
    tracks=(
        Track(gradient_layers.NORM_GROWTH, (*flat(0, 3), 40, 40, 0)),
        Track(
            gradient_layers.NORM_GROWN,
            (*flat(None, 3), 1, 1, "stale"),
            {"lowest": "0.5", "usual": "20"},
        ),
    ),
    fires={
        Severity.WARNING: "The usual gradient norm of run demo is 40 times as large as its "
        "lowest, and the learning rate is not. It has grown: lowest 0.5, usual 20."
    },
    at=4,
    not_yet=(2, 17),
)

_GROWN_OUTLASTED = Example(
    title="a norm that was forty times as large for some minutes, directly afterwards",
    minutes=10,
    tracks=(Track(gradient_layers.NORM_GROWTH, (*flat(0, 3), 40, 40, 0)),),
    fires={
        Severity.WARNING: "The usual gradient norm of run demo is 40 times as large as its "
        "lowest, and the learning rate is not."
    },
    at=10,
)

_WITH_THE_RATE = Example(
    title="a norm that grows as the learning rate does",
    minutes=6,
    tracks=(Track(gradient_layers.NORM_GROWTH, (0,)),),
)

EXAMPLES = {
    "MpAgentLossRelapsed": Examples(firing=(_BACK, _RELAPSED_OUTLASTED), quiet=(_SLOWLY,)),
    "MpAgentGradientNormGrown": Examples(
        firing=(_GROWN, _GROWN_OUTLASTED), quiet=(_WITH_THE_RATE,)
    ),
}
