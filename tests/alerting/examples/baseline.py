"""Examples of alerts on runs that differ from the good runs of their baseline."""

from mp_agent.alerting.values import Severity
from mp_agent.catalog.metrics import baseline
from tests.alerting.examples.example import Example, Examples, Track, flat

_TRAINED = Example(
    title="a layer that is trained and was frozen in good runs",
    minutes=12,
    tracks=(
        Track(baseline.BASELINE_DEPARTURES, (*flat(0, 5), 1)),
        Track(
            baseline.BASELINE_DEPARTURE,
            (*flat(None, 5), 1),
            {
                "quantity": "parameter",
                "layer": "embed.weight",
                "step": "1",
                "value": "trained",
                "expected": "not trained",
            },
        ),
    ),
    fires={
        Severity.WARNING: "Run demo differs from its baseline in 1 respect(s). Among them: "
        "step 1, layer embed.weight, quantity parameter, value trained, expected not trained."
    },
    at=8,
    not_yet=(4,),
)

_LIKE = Example(
    title="a run like its baseline",
    minutes=6,
    tracks=(Track(baseline.BASELINE_DEPARTURES, (0,)),),
)

_WITHOUT = Example(title="a run without a baseline", minutes=6, tracks=())


EXAMPLES = {
    "MpAgentUnlikeBaseline": Examples(firing=(_TRAINED,), quiet=(_LIKE, _WITHOUT)),
}
