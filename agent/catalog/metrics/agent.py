"""Metrics of the node agent itself: transport, export, flight records."""

from mp_agent.catalog.metric import Scope, counter, gauge, info

BUILD = info(
    "mp_agent.build.info",
    scope=Scope.AGENT,
    labels=("version",),
    help="Version of the node agent; the value is always 1.",
    read=lambda agent: {(agent.version,): 1.0},
)
COUNTING = gauge(
    "mp_agent.counting",
    "s",
    scope=Scope.AGENT,
    help="Time since the counters of this node started at 0, including restarts of the agent.",
    read=lambda agent: agent.counting_seconds,
)
PROBE_ERRORS = counter(
    "mp_agent.probe.errors",
    "{error}",
    scope=Scope.AGENT,
    help="Errors that the probes of this node contained instead of raising into training.",
    read=lambda agent: float(agent.probe_errors),
)
SETTING_ERRORS = counter(
    "mp_agent.setting.errors",
    "{error}",
    scope=Scope.AGENT,
    help="Environment and file settings that were ignored because their value was invalid.",
    read=lambda agent: float(agent.setting_errors),
)
RECORDS_DROPPED = counter(
    "mp_agent.records.dropped",
    "{record}",
    scope=Scope.AGENT,
    help="Records of steps, and of their layers, that were lost: overwritten before they were "
    "read, impossible to write, not brought by the device, or not received from another node "
    "before the run was over.",
    read=lambda agent: float(agent.records_dropped),
)
SERIES_DROPPED = counter(
    "mp_agent.series.dropped",
    "{series}",
    scope=Scope.AGENT,
    help="Series left out of an export because of max_series.",
    read=lambda agent: float(agent.series_dropped),
)

AGENT_METRICS = (
    BUILD,
    COUNTING,
    counter(
        "mp_agent.probe",
        "s",
        scope=Scope.AGENT,
        help="Host time that the probes of this node have spent inside training steps.",
        read=lambda agent: agent.probe_seconds,
    ),
    PROBE_ERRORS,
    SETTING_ERRORS,
    RECORDS_DROPPED,
    SERIES_DROPPED,
    gauge(
        "mp_agent.scrape.duration",
        "s",
        scope=Scope.AGENT,
        help="Time that the previous scrape took to render.",
        read=lambda agent: agent.scrape_duration_seconds,
    ),
    info(
        "mp_agent.unsupported.info",
        scope=Scope.AGENT,
        labels=("feature",),
        help="A feature of this run that the probe cannot measure.",
        read=lambda agent: {(feature,): 1.0 for feature in agent.unsupported},
    ),
)


EXPORT_METRICS = (
    counter(
        "mp_agent.export.failures",
        "{push}",
        scope=Scope.AGENT,
        labels=("exporter",),
        help="Pushes that failed, fully or partially, by exporter. No increment is lost: "
        "counters are cumulative.",
        read=lambda agent: {(e.exporter,): float(e.failures) for e in agent.exports},
    ),
    counter(
        "mp_agent.export.rejected",
        "{item}",
        scope=Scope.AGENT,
        labels=("exporter",),
        help="Data points, log records and spans that an endpoint rejected permanently, and "
        "numbers that a tracker did not get, by exporter.",
        read=lambda agent: {(e.exporter,): float(e.rejected) for e in agent.exports},
    ),
    gauge(
        "mp_agent.export.last_success.timestamp",
        "s",
        scope=Scope.AGENT,
        labels=("exporter",),
        help="Unix time of the last successful push; absent before the first.",
        read=lambda agent: {(e.exporter,): e.last_success_unix_seconds for e in agent.exports},
    ),
)


FLIGHT_METRICS = (
    counter(
        "mp_agent.flight.records",
        "{record}",
        scope=Scope.AGENT,
        help="Flight records that this node agent has written of the run.",
        read=lambda agent: float(agent.flight_records),
    ),
    counter(
        "mp_agent.flight.errors",
        "{record}",
        scope=Scope.AGENT,
        help="Flight records that could not be written, for example to a full disk or another "
        "user's directory.",
        read=lambda agent: float(agent.flight_errors),
    ),
)


TRANSPORT_METRICS = (
    counter(
        "mp_agent.push.failures",
        "{push}",
        scope=Scope.AGENT,
        help="Failed attempts to send a report to the root agent; rows are kept and retried.",
        read=lambda agent: float(agent.transport.push_failures),
    ),
    counter(
        "mp_agent.push.sent",
        "By",
        scope=Scope.AGENT,
        help="Compressed bytes of the reports that the root agent has acknowledged.",
        read=lambda agent: float(agent.transport.pushed_bytes),
    ),
    gauge(
        "mp_agent.push.last_success.timestamp",
        "s",
        scope=Scope.AGENT,
        help="Unix time at which the root agent last answered a report; absent before the first, "
        "and at the root itself.",
        read=lambda agent: agent.transport.last_push_unix_seconds,
    ),
    counter(
        "mp_agent.reports.dropped",
        "{report}",
        scope=Scope.AGENT,
        help="Reports discarded, or sent without their layers, because the root agent could not "
        "accept them.",
        read=lambda agent: float(agent.transport.reports_dropped),
    ),
    counter(
        "mp_agent.rows.received",
        "By",
        scope=Scope.AGENT,
        help="Compressed bytes of the reports that other nodes have sent to this root agent.",
        read=lambda agent: float(agent.transport.received_bytes),
    ),
    counter(
        "mp_agent.rows.refused",
        "{request}",
        scope=Scope.AGENT,
        help="Requests with rows that were rejected: without the run's token, too large, too "
        "many, unreadable, or for another attempt.",
        read=lambda agent: float(agent.transport.requests_refused),
    ),
    gauge(
        "mp_agent.nodes.known",
        "{node}",
        scope=Scope.AGENT,
        help="Nodes that the root agent knows in this attempt, including itself.",
        read=lambda agent: agent.transport.nodes_known,
    ),
)
