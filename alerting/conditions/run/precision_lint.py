"""MpAgentPrecisionLint."""

from mp_agent.alerting.condition import Condition, Level
from mp_agent.alerting.examples.example import Example, Track, flat
from mp_agent.alerting.expressions import metrics
from mp_agent.alerting.expressions.predicates import Compare
from mp_agent.alerting.expressions.signals import Number, Series
from mp_agent.alerting.severity import Severity

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

PRECISION_LINT = Condition(
    name="MpAgentPrecisionLint",
    summary="The code of the run has a mixed-precision mistake.",
    meaning="The main script, or a file of its project that it imports, does something that "
    "mixed-precision training is known to fail or to waste time by. The run may be healthy so far.",
    confirm="Run mp-agent check on the script: it shows the lines. mp-agent check --explain and "
    "the code of the rule say what is wrong and how to write it instead.",
    remedies=(
        "Fix the lines before the next start, or silence them with a comment "
        "# mp-agent: ignore if they are right.",
    ),
    why="The check needs no run: it sees a mistake before the first overflow shows it.",
    levels=(
        Level(
            severity=Severity.INFO,
            when=Compare(Series(metric=metrics.LINT_FINDINGS, keep=("rule",)), ">", Number(0)),
            description="The code of run {run} breaks rule {rule} of mp-agent check in "
            "{value|count} place(s).",
            reason="No delay: code does not change while it runs.",
        ),
    ),
    firing=(_FINDINGS,),
    quiet=(_FIXED,),
)
