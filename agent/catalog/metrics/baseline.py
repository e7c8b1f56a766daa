"""Metrics of a run against the good runs of its baseline."""

from mp_agent.catalog.metric import Reading, gauge, info
from mp_agent.records.views import RunView

_NAMED_AT_MOST = 5


def _departures(run: RunView) -> Reading:
    if run.departures is None:
        return None
    return {
        (str(one.step), one.layer, one.quantity, one.value, one.expected): 1.0
        for one in run.departures[:_NAMED_AT_MOST]
    }


BASELINE_DEPARTURES = gauge(
    "mp_agent.baseline.departures",
    "{difference}",
    help="What of a run differs from the good runs of its baseline: parameters that are trained, "
    "formats, and quantities outside their band; absent without a baseline.",
    read=lambda run: None if run.departures is None else float(len(run.departures)),
)
BASELINE_DEPARTURE = info(
    "mp_agent.baseline.departure.info",
    labels=("step", "layer", "quantity", "value", "expected"),
    help="What of a run differs from its baseline, the step on which it first did, its value then, "
    "and what good runs had; 5 at most, those of the first steps.",
    read=_departures,
)

BASELINE_METRICS = (BASELINE_DEPARTURES, BASELINE_DEPARTURE)
