"""Agent scope: the flight records that a node agent writes."""

from mp_agent.catalog.metric import Kind, Metric, Scope

FLIGHT_METRICS = (
    Metric(
        name="mp_agent.flight.records",
        unit="{record}",
        kind=Kind.COUNTER,
        scope=Scope.AGENT,
        help="Flight records that this node agent has written of the run.",
        read=lambda agent: float(agent.flight_records),
    ),
    Metric(
        name="mp_agent.flight.errors",
        unit="{record}",
        kind=Kind.COUNTER,
        scope=Scope.AGENT,
        help="Flight records that could not be written, for example to a full disk or another "
        "user's directory.",
        read=lambda agent: float(agent.flight_errors),
    ),
)
