"""Alerts on the agents themselves."""

from mp_agent.alerting import panels
from mp_agent.alerting.backtesting import Quantity
from mp_agent.alerting.condition import Condition, Level
from mp_agent.alerting.conditions.guards import standing
from mp_agent.alerting.durations import duration
from mp_agent.alerting.expressions import (
    Compare,
    Count,
    Number,
    Series,
    Signal,
    Silent,
    any_of,
    unless,
)
from mp_agent.alerting.panels import Guidance
from mp_agent.alerting.values import Severity
from mp_agent.catalog.metric import Metric
from mp_agent.catalog.metrics import agent, run

_HOLD = duration("coverage_hold")
_COVERAGE = Series(metric=run.COVERAGE, aggregate="min")


COVERAGE_LOW = Condition(
    name="MpAgentCoverageLow",
    summary="Merged metrics do not cover all ranks.",
    meaning="Data of the missing ranks is absent: a norm with missing shards is not evaluated "
    "by any condition, and sums and means cover only the other ranks.",
    confirm="mp_agent_missing_rank_info names the ranks; mp_agent_rank_up and "
    "mp_agent_push_failures_total show whether their node agent is alive and reaches the root.",
    remedies=(
        "Check the node agent of the missing ranks: its log, and whether it can reach the root "
        "agent's address and port.",
        "Raise merge_deadline_seconds if rows arrive late, for example on a slow network.",
        "If the rank itself has ended, see the run's other alerts.",
    ),
    why="A step is merged when all rows have arrived or its deadline has passed; ranks are "
    "missing because their agent is dead, disconnected or late.",
    levels=(
        Level(
            severity=Severity.WARNING,
            when=unless(Compare(_COVERAGE, "<", Number(1)), standing(_HOLD)),
            hold=_HOLD,
            keep=duration("rank_keep"),
            description="The merged metrics of run {run} cover {value|percent} of its "
            "ranks.{mp_agent_missing_rank_info| Missing: rank |rank}",
            reason="A single step without a rank is normal; a rank that is intermittently "
            "missing raises one alert.",
        ),
    ),
    quiet=(
        "a rank that misses the deadline occasionally",
        "a run that hung when a rank died, with a last step without that rank",
        "a run that ended, one rank earlier than the others",
    ),
    needs=((Quantity.RANKS,),),
    guidance=Guidance(
        harm="Training may be healthy, but norms and counts cover only part of it, and conditions "
        "on norms are not evaluated in the meantime.",
        query='mp_agent_missing_rank_info{run="RUN"}',
        reading="The ranks that the merged numbers do not include. Ranks of a single host indicate "
        "a problem with its node agent, or with its connection to the root agent.",
        causes=(
            "A node agent that died or was never started: with node_agent = external, check its "
            "process or sidecar.",
            "The root agent is unreachable from that node: firewall, network policy, a closed "
            "port, a name that does not resolve.",
            "Agents of different versions, or without the run's token: their log says so.",
            "Ranks that have ended while the others continue, as elastic jobs allow.",
            "Ranks that train nothing, such as actors, evaluators or loaders of data in the same "
            "world: they have no steps, and the norm is absent, since what they hold is not known. "
            "mp_agent.init(process_group=...) makes a run of the ranks that train.",
        ),
        false_positives=("The first minutes of a large run, while its nodes start one by one.",),
        samples=("check_agents",),
        panels=(panels.WHICH_ARE_MISSING, panels.COVERAGE, panels.RANKS_GONE),
    ),
)


_WINDOW = duration("telemetry_window")


def _count(metric: Metric) -> Count:
    return Count(metric=metric, window=_WINDOW)


_TROUBLE: Signal = (
    _count(agent.PROBE_ERRORS)
    + _count(agent.SETTING_ERRORS)
    + _count(agent.RECORDS_DROPPED)
    + _count(agent.SERIES_DROPPED)
)


TELEMETRY_DEGRADED = Condition(
    name="MpAgentTelemetryDegraded",
    summary="Telemetry is being lost.",
    meaning="Training is not affected, but monitoring is incomplete: a hook failed, a setting "
    "was ignored, records or series were dropped, or no data arrives at all.",
    confirm="Check mp_agent_probe_errors_total, mp_agent_setting_errors_total, "
    "mp_agent_records_dropped_total and mp_agent_series_dropped_total by node_rank; the node "
    "agent's log file has the details.",
    remedies=(
        "Read the node agent's log and the first lines of the job's log: each kind of error is "
        "logged once, and each ignored setting by name.",
        "Raise max_series if series are dropped; reserve a CPU for the node agent if records "
        "are dropped.",
        "Without any series: check that the job calls mp_agent.init(), and that the node agent "
        "sees its directory in shared memory.",
    ),
    why="The probe and the agent contain errors instead of disturbing the job; these counters "
    "report them.",
    levels=(
        Level(
            severity=Severity.WARNING,
            when=any_of(
                Compare(_TROUBLE, ">", Number(0)),
                Silent(agent.BUILD, duration("silent_window")),
            ),
            description="The telemetry{run| of run } is incomplete: {value|count} new error(s) "
            "and loss(es), or target(s) without any series.",
            reason="No delay: each error is a separate event. A target has half an hour to "
            "export its first series, because jobs take time to start.",
        ),
    ),
    quiet=(
        "a pod whose job takes twenty minutes to start",
        "targets of another exporter",
    ),
    needs=((Quantity.AGENT,),),
    guidance=Guidance(
        harm="Training is not affected, but its telemetry has gaps: lost records are missing from "
        "counters and norms, dropped series from dashboards.",
        query='{__name__=~"mp_agent_(probe_errors|setting_errors|records_dropped|series_dropped)'
        '_total", run="RUN"} > 0',
        reading="What was lost, and on which node. Errors of the probe are described once per kind "
        "in the rank's standard error and in the node agent's log.",
        causes=(
            "series_dropped: the model has more layers than max_series allows: raise it.",
            "records_dropped: the node agent had no CPU for so long that the ring was overwritten, "
            "or other nodes' rows arrived after merge_deadline_seconds.",
            "setting_errors: an MP_AGENT_ variable with an invalid value; in Kubernetes, a Service "
            "named mp-agent creates such variables.",
            "probe_errors: a model or wrapper that the probe does not support: please report it "
            "with the log.",
        ),
        false_positives=(
            "A burst of drops while a checkpoint overloads the node: no action is needed if it "
            "does not recur.",
        ),
        samples=("check_agents",),
        panels=(panels.AGENT_ERRORS, panels.DROPPED_RECORDS, panels.DROPPED_SERIES),
    ),
)


CONDITIONS = (
    COVERAGE_LOW,
    TELEMETRY_DEGRADED,
)
