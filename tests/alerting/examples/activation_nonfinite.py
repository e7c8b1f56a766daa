"""Examples of MpAgentActivationNonFinite."""

from mp_agent.alerting.expressions import metrics
from mp_agent.alerting.severity import Severity
from tests.alerting.examples.example import Example, Examples, Track, flat

_ONE_MODULE = Example(
    title="a module returns Inf on one sampled step",
    minutes=26,
    tracks=(
        Track(metrics.ACTIVATION_NONFINITE, (*flat(0, 10), 12)),
        Track(
            metrics.FIRST_NONFINITE_OUTPUT,
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
    tracks=(Track(metrics.ACTIVATION_NONFINITE, (0,)),),
)

_OFF = Example(
    title="a run that does not measure outputs",
    minutes=15,
    without=(metrics.ACTIVATION_NONFINITE,),
)

EXAMPLES = {
    "MpAgentActivationNonFinite": Examples(
        firing=(_ONE_MODULE,),
        quiet=(_NEAR, _OFF),
    ),
}
