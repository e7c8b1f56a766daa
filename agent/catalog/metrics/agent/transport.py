"""Agent scope: how the rows of each node reach the root agent."""

from mp_agent.catalog.metric import Kind, Metric, Scope

TRANSPORT_METRICS = (
    Metric(
        name="mp_agent.push.failures",
        unit="{push}",
        kind=Kind.COUNTER,
        scope=Scope.AGENT,
        help="Failed attempts to send a report to the root agent; rows are kept and retried.",
        read=lambda agent: float(agent.transport.push_failures),
    ),
    Metric(
        name="mp_agent.push.sent",
        unit="By",
        kind=Kind.COUNTER,
        scope=Scope.AGENT,
        help="Compressed bytes of the reports that the root agent has acknowledged.",
        read=lambda agent: float(agent.transport.pushed_bytes),
    ),
    Metric(
        name="mp_agent.push.last_success.timestamp",
        unit="s",
        kind=Kind.GAUGE,
        scope=Scope.AGENT,
        help="Unix time at which the root agent last answered a report; absent before the first, "
        "and at the root itself.",
        read=lambda agent: agent.transport.last_push_unix_seconds,
    ),
    Metric(
        name="mp_agent.reports.dropped",
        unit="{report}",
        kind=Kind.COUNTER,
        scope=Scope.AGENT,
        help="Reports discarded, or sent without their layers, because the root agent could not "
        "accept them.",
        read=lambda agent: float(agent.transport.reports_dropped),
    ),
    Metric(
        name="mp_agent.rows.received",
        unit="By",
        kind=Kind.COUNTER,
        scope=Scope.AGENT,
        help="Compressed bytes of the reports that other nodes have sent to this root agent.",
        read=lambda agent: float(agent.transport.received_bytes),
    ),
    Metric(
        name="mp_agent.rows.refused",
        unit="{request}",
        kind=Kind.COUNTER,
        scope=Scope.AGENT,
        help="Requests with rows that were rejected: without the run's token, too large, too "
        "many, unreadable, or for another attempt.",
        read=lambda agent: float(agent.transport.requests_refused),
    ),
    Metric(
        name="mp_agent.nodes.known",
        unit="{node}",
        kind=Kind.GAUGE,
        scope=Scope.AGENT,
        help="Nodes that the root agent knows in this attempt, including itself.",
        read=lambda agent: agent.transport.nodes_known,
    ),
)
