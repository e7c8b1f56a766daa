"""Fleet: every run of a cluster at a glance."""

from grafana.panel import PER_SECOND, Board, Column, Panel, Query, Row, View, help_of
from grafana.queries import (
    FIRST_OPTIMIZER,
    RUN,
    aggregated,
    by_run,
    nonfinite_since,
    rate,
    series,
    share_of_steps,
    while_finite,
)
from grafana.style import (
    ALERT_STATE,
    ANY_IS_BAD,
    ANY_IS_NOTABLE,
    COVERAGE,
    ENDS,
    GRADIENT_NORM,
    GRADIENT_NORM_LINES,
    LOSS_IS_LINEAR_TO,
    LOSS_LEVEL,
    LOSS_SCALE,
    LOSS_SCALE_LINES,
    NORM_REACHES,
    RUN_STATE,
    SKIPPED,
    URGENCY,
    WORST,
    alerts_by_severity,
    detected_by_severity,
    runs_in_trouble,
    with_severity,
)
from mp_agent.alerting.conditions.agent import COVERAGE_LOW
from mp_agent.alerting.conditions.gradient_size import GRADIENT_EXPLOSION, GRADIENT_VANISHING
from mp_agent.alerting.conditions.loss_scale import (
    LOSS_SCALE_AT_FLOOR,
    LOSS_SCALE_LOW,
    LOSS_SCALE_LOW_AND_FALLING,
)
from mp_agent.alerting.conditions.mixed_precision import OVERFLOW_RATIO_HIGH
from mp_agent.alerting.conditions.run import RUN_STALLED

_RUN_LINK = (
    "/d/mp-agent-run?${datasource:queryparam}&${__url_time_range}"
    "&var-cluster=${__data.fields.Cluster}&var-namespace=${__data.fields.Namespace}"
    "&var-job=${__data.fields.Job}&var-run=${__data.fields.Run}"
)
_ACTIVE = f"({by_run('mp_agent_run_active')} == 1)"
_OF_ACTIVE = f"and on ({', '.join(RUN)}) {_ACTIVE}"
_CHANGES = aggregated(f"changes({series('mp_agent_step')}[10m])", "max")


_NOTHING = f"0 * {by_run('mp_agent_run_active')}"
"""0 for every run, so that one without an alert sorts below all that have one."""


_SILENT = (
    f"({_CHANGES} == 0 {_OF_ACTIVE}) or ("
    f"{aggregated('last_over_time(' + series('mp_agent_run_active') + '[$__range])', 'max')} == 1 "
    f"unless on ({', '.join(RUN)}) {by_run('mp_agent_run_active')})"
)
"""Runs that make no step, and those that were active and report nothing any more."""
_URGENCY = " or ".join(
    [
        f"({with_severity('critical')}) * 0 + 4",
        f"({with_severity('warning')}) * 0 + 3",
        f"({_SILENT}) * 0 + 2",
        f"({with_severity('info')}) * 0 + 1",
        f"{by_run('mp_agent_run_active')} - 1",
    ]
)
"""How soon a person has to look: of a healthy run 0, of one that has ended -1."""


def _or_nan(name: str, quantity: str, where: str = "") -> str:
    """Return a gauge, or NaN where the run has no finite value now."""
    finite = while_finite(by_run(name, where=where), quantity)
    return f"({finite}) or NaN * {nonfinite_since(quantity)}"


_LOSS = _or_nan("mp_agent_loss", "loss")
_NORM = _or_nan("mp_agent_grad_norm", "gradients", FIRST_OPTIMIZER)
_LOSS_LEVEL = (
    f"0 * {nonfinite_since('loss')} + 2 or "
    f"({by_run('mp_agent_loss_lost_steps')} > 0) * 0 + 2"
    f" or ({by_run('mp_agent_loss')} > {by_run('mp_agent_loss_spike_bound')}) * 0 + 1"
    f" or 0 * {by_run('mp_agent_loss_spike_bound')}"
)
"""The loss against the run's own: 2 where it is not finite or what was learned is lost, 1 above
the spike bound."""


def _stat(number: int, title: str, description: str, expression: str, **more: object) -> Panel:
    return Panel(
        id=number,
        title=title,
        description=description,
        queries=(Query(expression, instant=True),),
        view=View.STAT,
        width=4,
        height=4,
        **more,  # type: ignore[arg-type]
    )


_GLANCE = Row(
    title="At a glance",
    panels=(
        _stat(
            1,
            "Runs training",
            "Runs that are active now. A run counts once, however many nodes it has.",
            f"count({_ACTIVE}) or vector(0)",
        ),
        _stat(
            2,
            "Runs with something critical",
            "Runs with a firing critical alert, or with a critical condition that the node "
            "agent has detected: they are lost, or about to be.",
            runs_in_trouble("critical"),
            steps=ANY_IS_BAD,
        ),
        _stat(
            3,
            "Runs with a warning",
            "Runs with a firing warning, or with such a condition that the node agent has "
            "detected: investigate today.",
            runs_in_trouble("warning"),
            steps=ANY_IS_NOTABLE,
        ),
        _stat(
            4,
            "Runs standing still",
            "Active runs whose step did not change for ten minutes. This includes evaluation "
            "and checkpointing, which the alert excludes.",
            f"count({_CHANGES} == 0 {_OF_ACTIVE}) or vector(0)",
            steps=ANY_IS_NOTABLE,
            runbooks=(RUN_STALLED,),
        ),
        _stat(
            5,
            "Lowest coverage",
            "Lowest share of covered ranks among the active runs. Below 100 %, a rank or a node "
            "does not report.",
            f"min({by_run('mp_agent_coverage_ratio', 'min')} {_OF_ACTIVE})",
            unit="percentunit",
            steps=COVERAGE,
            runbooks=(COVERAGE_LOW,),
        ),
        _stat(
            6,
            "Steps skipped",
            "Share of the attempted steps that GradScaler skipped, over all runs and the time "
            "range. The healthy range is below 1 in 2000.",
            f"sum(increase({series('mp_agent_skipped_steps_total')}[$__range])) "
            f"/ (sum(increase({series('mp_agent_steps_total')}[$__range])) > 0)",
            unit="percentunit",
            steps=SKIPPED,
            runbooks=(OVERFLOW_RATIO_HIGH,),
        ),
    ),
)

_COLUMNS = (
    Column(name="run", title="Run", link=_RUN_LINK, link_title="Open the run"),
    Column(name="Value #M", title="Urgency", texts=URGENCY, width=95),
    Column(name="cluster", title="Cluster", width=100),
    Column(name="namespace", title="Namespace", width=100),
    Column(name="job", title="Job", width=100),
    Column(name="Value #A", title="State", texts=RUN_STATE, width=80),
    Column(name="reason", title="End", texts=ENDS, width=95),
    Column(name="Value #B", title="Step", unit="none", width=75),
    Column(name="Value #C", title="Steps/s", width=75, decimals=2),
    Column(name="Value #D", title="Loss", width=80, decimals=3),
    Column(name="Value #L", title="Loss level", texts=LOSS_LEVEL, width=100),
    Column(name="Value #E", title="Gradient norm", width=115, steps=GRADIENT_NORM),
    Column(name="Value #F", title="Loss scale", unit="none", width=95, steps=LOSS_SCALE),
    Column(name="Value #G", title="Skipped", unit="percentunit", width=80, steps=SKIPPED),
    Column(name="Value #H", title="Coverage", unit="percentunit", width=85, steps=COVERAGE),
    Column(name="Value #I", title="Worst condition", texts=WORST, width=140),
    Column(name="Value #J", title="Worst alert", texts=WORST, width=110),
)


def _table_query(expression: str, *, optional: bool = False) -> Query:
    return Query(expression, instant=True, optional=optional)


_RUNS = Row(
    title="Runs",
    panels=(
        Panel(
            id=10,
            title="Runs",
            description="One line per run, by what needs a person first: critical, then warning "
            "(conditions and alerts alike), then silent (no step for ten minutes, or active within "
            "the time range and no data now), info, healthy, ended. Click a run to open it. "
            "Gradient norm, loss scale and skipped share have the colors of the alerts' "
            "severities: red critical, orange warning, blue info. Loss and norm are NaN where they "
            "are NaN or Inf now. The loss is compared with the run's own history: orange is above "
            "mp_agent_loss_spike_bound, red is a run that has lost what it had learned, or whose "
            "loss is NaN or Inf; no color before 64 losses. Conditions are detected by the node "
            "agents, alerts by the rules in Prometheus.",
            view=View.TABLE,
            width=24,
            height=9,
            nothing="No run",
            columns=_COLUMNS,
            sort_by=("Urgency", "Worst alert", "Worst condition"),
            queries=(
                _table_query(by_run("mp_agent_run_active")),
                _table_query(by_run("mp_agent_step")),
                _table_query(rate("mp_agent_steps_total")),
                _table_query(_LOSS),
                _table_query(_NORM),
                _table_query(by_run("mp_agent_loss_scale", "min"), optional=True),
                _table_query(share_of_steps("mp_agent_skipped_steps_total")),
                _table_query(by_run("mp_agent_coverage_ratio", "min")),
                _table_query(f"{detected_by_severity(keep=RUN)} or {_NOTHING}"),
                _table_query(f"{alerts_by_severity(keep=RUN)} or {_NOTHING}"),
                _table_query(by_run("mp_agent_run_end_info", keep=("reason",)), optional=True),
                _table_query(_LOSS_LEVEL, optional=True),
                _table_query(_URGENCY),
            ),
        ),
        Panel(
            id=12,
            title="Conditions in force",
            description="Conditions that the node agents detect, step by step: red critical, "
            "orange warning, blue info. No rules in Prometheus are needed. Empty if healthy.",
            view=View.TIMELINE,
            width=24,
            height=6,
            minimum=0,
            nothing="No condition in this time",
            texts=ALERT_STATE,
            queries=(
                Query(
                    detected_by_severity(keep=("run", "condition")),
                    "{{run}} {{condition}}",
                    optional=True,
                ),
            ),
        ),
        Panel(
            id=11,
            title="Alerts in force",
            description="Each line is an alert of a run: red critical, orange warning, blue "
            "info. Empty if healthy and Prometheus has the rules.",
            view=View.TIMELINE,
            width=24,
            height=6,
            minimum=0,
            nothing="No alert in this time",
            texts=ALERT_STATE,
            queries=(
                Query(
                    alerts_by_severity(keep=("run", "alertname")),
                    "{{run}} {{alertname}}",
                    optional=True,
                ),
            ),
        ),
    ),
)

_PROGRESS = Row(
    title="Progress",
    panels=(
        Panel(
            id=20,
            title="Steps per second",
            description="Optimizer steps per second of each run, including skipped steps.",
            queries=(Query(rate("mp_agent_steps_total"), "{{run}}"),),
            unit=PER_SECOND,
            minimum=0,
        ),
        Panel(
            id=21,
            title="Loss",
            description=help_of("mp_agent_loss")
            + " The axis is logarithmic, so the explosion of one run does not flatten the others.",
            queries=(Query(while_finite(by_run("mp_agent_loss"), "loss"), "{{run}}"),),
            log_base=10,
            log_around_zero=LOSS_IS_LINEAR_TO,
            many_decades=True,
        ),
        Panel(
            id=22,
            title="Gradient norm",
            description="Global norm before clipping, log scale. Dashed: limits of the alerts "
            "on explosion (<grad_norm_high>, <grad_norm_extreme>) and on vanishing "
            "(<grad_norm_low>, <grad_norm_very_low>, <grad_norm_vanished>).",
            queries=(
                Query(
                    while_finite(by_run("mp_agent_grad_norm", where=FIRST_OPTIMIZER), "gradients"),
                    "{{run}}",
                ),
            ),
            log_base=10,
            many_decades=True,
            steps=GRADIENT_NORM_LINES,
            lines=True,
            reaches=NORM_REACHES,
            runbooks=(GRADIENT_EXPLOSION, GRADIENT_VANISHING),
        ),
        Panel(
            id=23,
            title="Loss scale",
            description="GradScaler's scale, log2. Dashed: <loss_scale_very_low> and "
            "<loss_scale_low>, below which FP16 has too little range, and the floor, "
            "<loss_scale_floor>.",
            queries=(Query(by_run("mp_agent_loss_scale", "min"), "{{run}}", optional=True),),
            unit="none",
            log_base=2,
            minimum=0.5,
            nothing="No run has a loss scale",
            steps=LOSS_SCALE_LINES,
            lines=True,
            runbooks=(
                LOSS_SCALE_LOW,
                LOSS_SCALE_LOW_AND_FALLING,
                LOSS_SCALE_AT_FLOOR,
            ),
        ),
        Panel(
            id=24,
            title="Skipped steps",
            description="Skipped per attempted step. Some at the start are normal: GradScaler "
            "calibrates its scale. Dashed: limits of the alerts.",
            queries=(Query(share_of_steps("mp_agent_skipped_steps_total"), "{{run}}"),),
            unit="percentunit",
            minimum=0,
            soft_maximum=0.12,
            steps=SKIPPED,
            lines=True,
            runbooks=(OVERFLOW_RATIO_HIGH,),
        ),
        Panel(
            id=25,
            title="Coverage",
            description=help_of("mp_agent_coverage_ratio"),
            queries=(Query(by_run("mp_agent_coverage_ratio", "min"), "{{run}}"),),
            unit="percentunit",
            minimum=0,
            maximum=1,
            runbooks=(COVERAGE_LOW,),
        ),
    ),
)

FLEET = Board(
    uid="mp-agent-fleet",
    title="mp_agent / Fleet",
    description="All training runs of a cluster: state, progress and problems.",
    rows=(_GLANCE, _RUNS, _PROGRESS),
)
