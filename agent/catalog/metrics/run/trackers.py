"""Run scope: where experiment trackers show the run."""

from mp_agent.catalog.metric import Kind, Metric, Scope

TRACKER_METRICS = (
    Metric(
        name="mp_agent.tracker.info",
        unit="",
        kind=Kind.INFO,
        scope=Scope.RUN,
        labels=("tracker", "name", "url"),
        help="An experiment tracker that the run is sent to (the setting trackers), what the run "
        "is called there, and where it is seen: a page, or a file address on the root agent's "
        "node; the value is always 1.",
        read=lambda run: {(at.tracker, at.name, at.url): 1.0 for at in run.trackers},
    ),
)
