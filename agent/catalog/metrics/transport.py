"""Agent scope: how the rows of each node reach the root agent."""

from mp_agent.catalog.metric import Kind, Metric, Scope

TRANSPORT_METRICS = (
    Metric(
        name="mp_agent.push.failures",
        unit="{push}",
        kind=Kind.COUNTER,
        scope=Scope.AGENT,
        help="Reports that the root agent did not take at this try; rows are kept and sent again.",
        read=lambda agent: float(agent.transport.push_failures),
    ),
    Metric(
        name="mp_agent.push.sent",
        unit="By",
        kind=Kind.COUNTER,
        scope=Scope.AGENT,
        help="Compressed bytes of the reports that the root agent has answered.",
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
        help="Reports given up, or sent without their layers, because the root agent could not "
        "take them.",
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
        help="Requests with rows that were turned away: without the run's token, too large, too "
        "many, unreadable, or not meant for this attempt.",
        read=lambda agent: float(agent.transport.requests_refused),
    ),
    Metric(
        name="mp_agent.nodes.known",
        unit="{node}",
        kind=Kind.GAUGE,
        scope=Scope.AGENT,
        help="Nodes that the root agent has heard of in this attempt, itself included.",
        read=lambda agent: agent.transport.nodes_known,
    ),
)
