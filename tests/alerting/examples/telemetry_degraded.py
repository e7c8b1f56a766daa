"""Examples of MpAgentTelemetryDegraded."""

from mp_agent.alerting.expressions import metrics
from mp_agent.alerting.severity import Severity
from mp_agent.catalog.metric import Metric
from tests.alerting.examples.example import Example, Examples, Track, Value, flat
from tests.alerting.examples.healthy import NODE


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
    tracks=(Track(metrics.SETTING_ERRORS, (None, None, 1), NODE),),
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
        Track(metrics.BUILD, (*flat(None, 20), 1), {**NODE, **_OTHER_TARGET, "version": "0.1.0"}),
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
    tracks=(Track(metrics.PROBE_ERRORS, _OLD, NODE), Track("up", (*flat(1, 30), 0, 1))),
    fires={Severity.WARNING: _fires(3)},
    at=5,
    not_yet=(29, 32, 35, 41),
)

EXAMPLES = {
    "MpAgentTelemetryDegraded": Examples(
        firing=(
            _rises(metrics.PROBE_ERRORS, 1),
            _rises(metrics.SETTING_ERRORS, 2),
            _rises(metrics.RECORDS_DROPPED, 500),
            _rises(metrics.SERIES_DROPPED, 40),
            _WRONG_FROM_THE_START,
            _SILENT_TARGET,
            _AFTER_FAILED_SCRAPE,
        ),
        quiet=(_STARTING, _OF_OTHERS),
    ),
}
