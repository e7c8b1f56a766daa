"""The second row of Run: what is wrong, since when, and where it began."""

from grafana.panel import Column, Panel, Query, Row, View, help_of
from grafana.queries import FIRST_OPTIMIZER, by_run, series
from grafana.style import (
    ALERT_STATE,
    ANY_IS_BAD,
    SEVERITIES,
    alerts_by_severity,
    detected_by_severity,
)
from mp_agent.alerting.conditions.nonfinite import NONFINITE_UPDATE, RANK_NONFINITE
from mp_agent.alerting.conditions.run import PRECISION_LINT
from mp_agent.catalog.metrics import BY_PROMETHEUS_NAME

_KEPT = ("condition", "severity")
_BOARD = (
    "?${datasource:queryparam}&${__url_time_range}&${cluster:queryparam}&${namespace:queryparam}"
    "&${job:queryparam}&${run:queryparam}"
)
_FACTS = ("run", *BY_PROMETHEUS_NAME["mp_agent_run_info"].labels)


def _title(label: str) -> str:
    return {"measuring_point": "Measured at", "torch_version": "torch"}.get(
        label, label.replace("_", " ").capitalize()
    )


TROUBLE = Row(
    title="What is wrong",
    panels=(
        Panel(
            id=14,
            title="Conditions in force",
            description="Conditions that the node agent detects, step by step: red critical, "
            "orange warning, blue info. No Prometheus rules are needed, and they appear before "
            "the alerts. Empty if healthy.",
            view=View.TIMELINE,
            width=12,
            height=7,
            minimum=0,
            nothing="No condition in this time",
            texts=ALERT_STATE,
            queries=(
                Query(detected_by_severity(keep=("condition",)), "{{condition}}", optional=True),
            ),
        ),
        Panel(
            id=10,
            title="Alerts in force",
            description="Each line is an alert that fired in this time range: red critical, "
            "orange warning, blue info. Empty if healthy and Prometheus has the rules.",
            view=View.TIMELINE,
            width=12,
            height=7,
            minimum=0,
            nothing="No alert in this time",
            texts=ALERT_STATE,
            queries=(
                Query(alerts_by_severity(keep=("alertname",)), "{{alertname}}", optional=True),
            ),
        ),
        Panel(
            id=15,
            title="Conditions so far",
            description="Conditions that the node agent has detected in this run: how often "
            "each started, and since which step it has been active. Empty if healthy.",
            view=View.TABLE,
            width=10,
            height=6,
            nothing="No condition in this run",
            columns=(
                Column(name="condition", title="Condition"),
                Column(name="severity", title="Severity", width=90, texts=SEVERITIES),
                Column(name="Value #A", title="Times", unit="none", width=70),
                Column(name="Value #B", title="Since step", unit="none", width=100),
            ),
            queries=(
                Query(
                    f"{by_run('mp_agent_condition_fired_total', keep=_KEPT)} > 0",
                    instant=True,
                    optional=True,
                ),
                Query(
                    by_run("mp_agent_condition_since_step", keep=_KEPT), instant=True, optional=True
                ),
            ),
        ),
        Panel(
            id=11,
            title="First non-finite value",
            description=help_of("mp_agent_first_nonfinite_info")
            + " Click to open the layer or the ranks. Empty if healthy.",
            view=View.TABLE,
            width=10,
            height=6,
            nothing="All values were finite",
            columns=(
                Column(name="step", title="Step", unit="none", width=80),
                Column(name="phase", title="Phase", width=90),
                Column(
                    name="rank",
                    title="Rank",
                    width=70,
                    link=f"/d/mp-agent-ranks{_BOARD}",
                    link_title="Open the ranks",
                ),
                Column(
                    name="layer",
                    title="Layer",
                    link=f"/d/mp-agent-layers{_BOARD}&var-layer=${{__value.text}}",
                    link_title="Open the layer",
                ),
            ),
            queries=(
                Query(
                    by_run(
                        "mp_agent_first_nonfinite_info", keep=("step", "rank", "layer", "phase")
                    ),
                    instant=True,
                    optional=True,
                ),
            ),
            runbooks=(RANK_NONFINITE,),
        ),
        Panel(
            id=12,
            title="Non-finite updates",
            description=help_of("mp_agent_nonfinite_updates_total")
            + " A single one can destroy the weights.",
            view=View.STAT,
            width=4,
            height=6,
            decimals=0,
            steps=ANY_IS_BAD,
            queries=(Query(by_run("mp_agent_nonfinite_updates_total", where=FIRST_OPTIMIZER)),),
            runbooks=(NONFINITE_UPDATE,),
        ),
        Panel(
            id=16,
            title="Mistakes in the code",
            description=help_of("mp_agent_lint_findings")
            + " mp-agent check shows the lines, and what is wrong with them.",
            view=View.TABLE,
            width=24,
            height=4,
            nothing="Nothing found, or not checked",
            columns=(
                Column(name="rule", title="Rule", width=120),
                Column(name="Value", title="Findings", unit="none"),
            ),
            queries=(
                Query(
                    by_run("mp_agent_lint_findings", keep=("rule",)), instant=True, optional=True
                ),
            ),
            runbooks=(PRECISION_LINT,),
        ),
        Panel(
            id=13,
            title="Facts",
            description=help_of("mp_agent_run_info")
            + ' "Measured at" is the point where gradients were measured: at optimizer_step '
            "they are those after clipping.",
            view=View.TABLE,
            width=24,
            height=4,
            nothing="No such run",
            columns=tuple(Column(name=name, title=_title(name)) for name in _FACTS),
            queries=(Query(series("mp_agent_run_info"), instant=True),),
        ),
        Panel(
            id=17,
            title="Experiment trackers",
            description=help_of("mp_agent_tracker_info"),
            view=View.TABLE,
            width=24,
            height=4,
            nothing="This run is sent to no tracker",
            columns=(
                Column(name="tracker", title="Tracker", width=120),
                Column(name="name", title="Name"),
                Column(
                    name="url",
                    title="Address",
                    link="${__value.raw}",
                    link_title="Open the run in its tracker",
                ),
            ),
            queries=(
                Query(
                    by_run("mp_agent_tracker_info", keep=("tracker", "name", "url")),
                    instant=True,
                    optional=True,
                ),
            ),
        ),
    ),
)
