"""Examples of MpAgentPrecisionLint."""

from mp_agent.alerting.expressions import metrics
from mp_agent.alerting.severity import Severity
from tests.alerting.examples.example import Example, Examples, Track, flat

_RULE = {"rule": "MP106"}

_FINDINGS = Example(
    title="a script that clips before unscale_ in two places",
    minutes=12,
    tracks=(Track(metrics.LINT_FINDINGS, (*flat(None, 5), 2), _RULE),),
    fires={
        Severity.INFO: "The code of run demo breaks rule MP106 of mp-agent check in 2 place(s)."
    },
    labels={"rule": "MP106"},
    at=6,
    not_yet=(4,),
)

_FIXED = Example(
    title="a rule without findings",
    minutes=12,
    tracks=(Track(metrics.LINT_FINDINGS, (0,), _RULE),),
)

EXAMPLES = {
    "MpAgentPrecisionLint": Examples(
        firing=(_FINDINGS,),
        quiet=(_FIXED,),
    ),
}
