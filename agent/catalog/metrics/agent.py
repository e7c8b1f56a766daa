"""Metrics of the node agent itself: transport, export, flight records."""

from mp_agent.catalog.metric import agent_counter, agent_gauge, agent_info

BUILD = agent_info(
    "mp_agent.build.info",
    labels=("version",),
    help="Version of the node agent; the value is always 1.",
    read=lambda agent: {(agent.version,): 1.0},
)
COUNTING = agent_gauge(
    "mp_agent.counting",
    "s",
    help="Time since the counters of this node started at 0, including restarts of the agent.",
    read=lambda agent: agent.counting_seconds,
)
PROBE_ERRORS = agent_counter(
    "mp_agent.probe.errors",
    "{error}",
    help="Errors that the probes of this node contained instead of raising into training.",
    read=lambda agent: float(agent.probe_errors),
)
SETTING_ERRORS = agent_counter(
    "mp_agent.setting.errors",
    "{error}",
    help="Environment and file settings that were ignored because their value was invalid.",
    read=lambda agent: float(agent.setting_errors),
)
RECORDS_DROPPED = agent_counter(
    "mp_agent.records.dropped",
    "{record}",
    help="Records of steps, and of their layers, that were lost: overwritten before they were "
    "read, impossible to write, to read or to merge, not brought by the device, or not received "
    "from another node before the run was over.",
    read=lambda agent: float(agent.records_dropped),
)
SERIES_DROPPED = agent_counter(
    "mp_agent.series.dropped",
    "{series}",
    help="Series left out of an export because of max_series.",
    read=lambda agent: float(agent.series_dropped),
)

AGENT_METRICS = (
    BUILD,
    COUNTING,
    agent_counter(
        "mp_agent.probe",
        "s",
        help="Host time that the probes of this node have spent inside training steps.",
        read=lambda agent: agent.probe_seconds,
    ),
    PROBE_ERRORS,
    SETTING_ERRORS,
    RECORDS_DROPPED,
    SERIES_DROPPED,
    agent_gauge(
        "mp_agent.rank_series.left_out",
        "{series}",
        help="Series of healthy ranks of this node that rank_series leaves out now; absent "
        "without rank_series.",
        read=lambda agent: agent.rank_series_left_out,
    ),
    agent_gauge(
        "mp_agent.scrape.duration",
        "s",
        help="Time that the previous scrape took to render.",
        read=lambda agent: agent.scrape_duration_seconds,
    ),
    agent_info(
        "mp_agent.unsupported.info",
        labels=("feature",),
        help="A feature of this run that the probe cannot measure.",
        read=lambda agent: {(feature,): 1.0 for feature in agent.unsupported},
    ),
)


EXPORT_METRICS = (
    agent_counter(
        "mp_agent.export.failures",
        "{push}",
        labels=("exporter",),
        help="Pushes that failed, fully or partially, by exporter. No increment is lost: "
        "counters are cumulative.",
        read=lambda agent: {(e.exporter,): float(e.failures) for e in agent.exports},
    ),
    agent_counter(
        "mp_agent.export.rejected",
        "{item}",
        labels=("exporter",),
        help="Data points, log records and spans that an endpoint rejected permanently or did not "
        "take within an hour, and numbers that a tracker did not get, by exporter.",
        read=lambda agent: {(e.exporter,): float(e.rejected) for e in agent.exports},
    ),
    agent_gauge(
        "mp_agent.export.last_success.timestamp",
        "s",
        labels=("exporter",),
        help="Unix time of the last successful push; absent before the first.",
        read=lambda agent: {(e.exporter,): e.last_success_unix_seconds for e in agent.exports},
    ),
)


FLIGHT_METRICS = (
    agent_counter(
        "mp_agent.flight.records",
        "{record}",
        help="Flight records that this node agent has written of the run.",
        read=lambda agent: float(agent.flight_records),
    ),
    agent_counter(
        "mp_agent.flight.errors",
        "{record}",
        help="Flight records that could not be written, for example to a full disk or another "
        "user's directory.",
        read=lambda agent: float(agent.flight_errors),
    ),
)


TRANSPORT_METRICS = (
    agent_counter(
        "mp_agent.push.failures",
        "{push}",
        help="Failed attempts to send a report to the root agent; rows are kept and retried.",
        read=lambda agent: float(agent.transport.push_failures),
    ),
    agent_counter(
        "mp_agent.push.sent",
        "By",
        help="Compressed bytes of the reports that the root agent has acknowledged.",
        read=lambda agent: float(agent.transport.pushed_bytes),
    ),
    agent_gauge(
        "mp_agent.push.last_success.timestamp",
        "s",
        help="Unix time at which the root agent last answered a report; absent before the first, "
        "and at the root itself.",
        read=lambda agent: agent.transport.last_push_unix_seconds,
    ),
    agent_counter(
        "mp_agent.reports.dropped",
        "{report}",
        help="Reports discarded, or sent without their layers, because the root agent could not "
        "accept them.",
        read=lambda agent: float(agent.transport.reports_dropped),
    ),
    agent_gauge(
        "mp_agent.push.interval",
        "s",
        help="Time between two pushes of rows to the root agent, as the root has set it; at the "
        "root, the longest that a node may follow. Absent at the root of a run on one node.",
        read=lambda agent: agent.transport.push_interval_seconds,
    ),
    agent_counter(
        "mp_agent.push.put_off",
        "{push}",
        help="Pushes that the root agent asked to be sent later because many nodes pushed at "
        "once; rows are kept meanwhile.",
        read=lambda agent: float(agent.transport.pushes_put_off),
    ),
    agent_counter(
        "mp_agent.rows.received",
        "By",
        help="Compressed bytes of the reports that other nodes have sent to this root agent.",
        read=lambda agent: float(agent.transport.received_bytes),
    ),
    agent_counter(
        "mp_agent.rows.refused",
        "{request}",
        help="Requests with rows that were rejected: without the run's token, too large, too "
        "many, unreadable, or for another attempt.",
        read=lambda agent: float(agent.transport.requests_refused),
    ),
    agent_gauge(
        "mp_agent.nodes.known",
        "{node}",
        help="Nodes that the root agent knows in this attempt, including itself.",
        read=lambda agent: agent.transport.nodes_known,
    ),
)
