"""Examples of alerts on the agents themselves."""

from mp_agent.alerting.values import Severity
from mp_agent.catalog.metric import Metric
from mp_agent.catalog.metrics import agent
from mp_agent.catalog.metrics import run as run_metrics
from tests.alerting.examples.example import Example, Examples, Track, Value, flat, ramp
from tests.alerting.examples.healthy import NODE

_A_NODE_IS_SILENT = Example(
    title="a node of two ranks whose rows do not arrive; the alert lasts longer",
    minutes=42,
    tracks=(
        Track(run_metrics.COVERAGE, (*flat(1, 10), *flat(0.75, 21), 1)),
        Track(run_metrics.MISSING_RANK, (*flat(None, 10), *flat(1, 21), "stale"), {"rank": "2"}),
        Track(run_metrics.MISSING_RANK, (*flat(None, 10), *flat(1, 21), "stale"), {"rank": "3"}),
    ),
    fires={
        Severity.WARNING: "The merged metrics of run demo cover 75% of its ranks. Missing: rank "
        "2, 3.",
    },
    at=25,
    not_yet=(14, 40),
)

_OUTLASTED = Example(
    title="a node whose rows have just resumed",
    minutes=34,
    tracks=(Track(run_metrics.COVERAGE, (*flat(1, 10), *flat(0.75, 21), 1)),),
    fires={Severity.WARNING: "The merged metrics of run demo cover 75% of its ranks."},
    at=33,
)

_BRIEF = Example(
    title="a rank that misses the deadline occasionally",
    minutes=20,
    tracks=(Track(run_metrics.COVERAGE, (1, 0.75, 0.75, 1) * 5),),
)

_HUNG = Example(
    title="a run that hung when a rank died, with a last step without that rank",
    minutes=19,
    tracks=(
        Track(run_metrics.COVERAGE, (*flat(1, 10), 0.75)),
        Track(run_metrics.STEP, ramp(5000, 60, 11)),
        Track(run_metrics.STEPS, ramp(5000, 60, 11)),
    ),
)

_ENDED = Example(
    title="a run that ended, one rank earlier than the others",
    minutes=25,
    tracks=(
        Track(run_metrics.COVERAGE, (*flat(1, 10), 0.75)),
        Track(run_metrics.STEP, ramp(5000, 60, 11)),
        Track(run_metrics.STEPS, ramp(5000, 60, 11)),
        Track(run_metrics.RUN_ACTIVE, (*flat(1, 11), 0)),
        Track(run_metrics.RUN_END, (*flat(None, 11), 1), {"reason": "completed"}),
    ),
)


def _fires(count: int, run: str = " of run demo") -> str:
    return (
        f"The telemetry{run} is incomplete: {count} new error(s) and loss(es), or target(s) "
        "without any series."
    )


def _rises(metric: Metric, by: float) -> Example:
    name = metric.prometheus_name.removeprefix("mp_agent_").removesuffix("_total")
    return Example(
        title=f"a rise of {name.replace('_', ' ')}",
        minutes=26,
        tracks=(Track(metric, (*flat(0, 10), by), NODE),),
        fires={Severity.WARNING: _fires(int(by))},
        at=14,
        not_yet=(9, 25),
    )


_WRONG_FROM_THE_START = Example(
    title="an invalid setting that is known before the first scrape",
    age_minutes=0,
    minutes=21,
    tracks=(Track(agent.SETTING_ERRORS, (None, None, 1), NODE),),
    fires={Severity.WARNING: _fires(1)},
    at=5,
    not_yet=(1, 20),
)

_OTHER_TARGET = {"job": "mp-agent", "instance": "node-7:9464"}

_SILENT_TARGET = Example(
    title="a pod that opted in and is scraped, but has no series",
    minutes=42,
    tracks=(Track("up", (*flat(None, 5), 1), _OTHER_TARGET),),
    fires={Severity.WARNING: _fires(1, "")},
    labels={"job": "mp-agent", "run": ""},
    at=40,
    not_yet=(10, 30),
)

_STARTING = Example(
    title="a pod whose job takes twenty minutes to start",
    minutes=60,
    tracks=(
        Track("up", (1,), _OTHER_TARGET),
        Track(agent.BUILD, (*flat(None, 20), 1), {**NODE, **_OTHER_TARGET, "version": "0.1.0"}),
    ),
)

_OF_OTHERS = Example(
    title="targets of another exporter",
    minutes=45,
    tracks=(Track("up", (1,), {"job": "node-exporter", "instance": "node-7:9100"}),),
)

_OLD: tuple[Value, ...] = (*flat(3, 30), "stale", 3)

_AFTER_FAILED_SCRAPE = Example(
    title="old errors, but not again when a scrape fails",
    age_minutes=0,
    minutes=42,
    tracks=(Track(agent.PROBE_ERRORS, _OLD, NODE), Track("up", (*flat(1, 30), 0, 1))),
    fires={Severity.WARNING: _fires(3)},
    at=5,
    not_yet=(29, 32, 35, 41),
)


EXAMPLES = {
    "MpAgentCoverageLow": Examples(
        firing=(_A_NODE_IS_SILENT, _OUTLASTED),
        quiet=(_BRIEF, _HUNG, _ENDED),
    ),
    "MpAgentTelemetryDegraded": Examples(
        firing=(
            _rises(agent.PROBE_ERRORS, 1),
            _rises(agent.SETTING_ERRORS, 2),
            _rises(agent.RECORDS_DROPPED, 500),
            _rises(agent.SERIES_DROPPED, 40),
            _WRONG_FROM_THE_START,
            _SILENT_TARGET,
            _AFTER_FAILED_SCRAPE,
        ),
        quiet=(_STARTING, _OF_OTHERS),
    ),
}
