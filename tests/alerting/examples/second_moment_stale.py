"""Examples of MpAgentSecondMomentStale."""

from mp_agent.alerting.expressions import metrics
from mp_agent.alerting.severity import Severity
from tests.alerting.examples.example import Example, Examples, Track, flat

_NAMED = (
    "In 2 layer(s) of run demo, gradients were more than <moment_rms_high> times what Adam's "
    "second moment expects in the last <moment_rms_samples> samples."
)

_SHIFT = Example(
    title="gradients that grow faster than the second moment follows",
    minutes=46,
    tracks=(
        Track(metrics.LAYERS_MOMENT_STALE, (*flat(0, 10), *flat(2, 20), 0)),
        Track(
            metrics.MOMENT_STALE_LAYER,
            (*flat(None, 10), *flat(1, 20), "stale"),
            {"layer": "embed.weight"},
        ),
    ),
    fires={Severity.WARNING: f"{_NAMED} Among them: embed.weight."},
    at=29,
    not_yet=(9, 45),
)

_OUTLASTED = Example(
    title="stale second moments for some minutes, directly afterwards",
    minutes=36,
    tracks=(Track(metrics.LAYERS_MOMENT_STALE, (*flat(0, 10), *flat(2, 20), 0)),),
    fires={Severity.WARNING: _NAMED},
    at=35,
)

_NONE = Example(
    title="second moments that follow the gradients",
    minutes=15,
    tracks=(Track(metrics.LAYERS_MOMENT_STALE, (0,)),),
)

EXAMPLES = {
    "MpAgentSecondMomentStale": Examples(
        firing=(_SHIFT, _OUTLASTED),
        quiet=(_NONE,),
    ),
}
