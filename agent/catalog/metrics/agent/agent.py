"""Agent scope: what mp_agent costs, loses and fails at."""

from mp_agent.catalog.metric import Kind, Metric, Scope

AGENT_METRICS = (
    Metric(
        name="mp_agent.build.info",
        unit="",
        kind=Kind.INFO,
        scope=Scope.AGENT,
        labels=("version",),
        help="Version of the node agent; the value is always 1.",
        read=lambda agent: {(agent.version,): 1.0},
    ),
    Metric(
        name="mp_agent.counting",
        unit="s",
        kind=Kind.GAUGE,
        scope=Scope.AGENT,
        help="Time since the counters of this node started at 0, including restarts of the agent.",
        read=lambda agent: agent.counting_seconds,
    ),
    Metric(
        name="mp_agent.probe",
        unit="s",
        kind=Kind.COUNTER,
        scope=Scope.AGENT,
        help="Host time that the probes of this node have spent inside training steps.",
        read=lambda agent: agent.probe_seconds,
    ),
    Metric(
        name="mp_agent.probe.errors",
        unit="{error}",
        kind=Kind.COUNTER,
        scope=Scope.AGENT,
        help="Errors that the probes of this node contained instead of raising into training.",
        read=lambda agent: float(agent.probe_errors),
    ),
    Metric(
        name="mp_agent.setting.errors",
        unit="{error}",
        kind=Kind.COUNTER,
        scope=Scope.AGENT,
        help="Environment and file settings that were ignored because their value was invalid.",
        read=lambda agent: float(agent.setting_errors),
    ),
    Metric(
        name="mp_agent.records.dropped",
        unit="{record}",
        kind=Kind.COUNTER,
        scope=Scope.AGENT,
        help="Records of steps, and of their layers, that were lost: overwritten before they were "
        "read, impossible to write, not brought by the device, or not received from another node "
        "before the run was over.",
        read=lambda agent: float(agent.records_dropped),
    ),
    Metric(
        name="mp_agent.series.dropped",
        unit="{series}",
        kind=Kind.COUNTER,
        scope=Scope.AGENT,
        help="Series left out of an export because of max_series.",
        read=lambda agent: float(agent.series_dropped),
    ),
    Metric(
        name="mp_agent.scrape.duration",
        unit="s",
        kind=Kind.GAUGE,
        scope=Scope.AGENT,
        help="Time that the previous scrape took to render.",
        read=lambda agent: agent.scrape_duration_seconds,
    ),
    Metric(
        name="mp_agent.unsupported.info",
        unit="",
        kind=Kind.INFO,
        scope=Scope.AGENT,
        labels=("feature",),
        help="A feature of this run that the probe cannot measure.",
        read=lambda agent: {(feature,): 1.0 for feature in agent.unsupported},
    ),
)
