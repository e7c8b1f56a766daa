"""Fleet: every run of a cluster at a glance."""

from grafana.panel import PER_SECOND, Board, Column, Panel, Query, Row, View, above, below, help_of
from grafana.queries import RUN, SELECTED, by_run, rate, series, share_of_steps
from grafana.style import (
    ALERT_STATE,
    ANY_IS_BAD,
    ANY_IS_NOTABLE,
    COVERAGE,
    RUN_STATE,
    conditions_by_severity,
    detected_by_severity,
)

_RUN_LINK = (
    "/d/mp-agent-run?${datasource:queryparam}&${__url_time_range}"
    "&var-cluster=${__data.fields.cluster}&var-namespace=${__data.fields.namespace}"
    "&var-job=${__data.fields.job}&var-run=${__data.fields.Run}"
)
_ACTIVE = f"{by_run('mp_agent_run_active')} == 1"


def _firing(severity: str) -> str:
    """Return how many alerts of a severity are firing; 0 where none is."""
    matchers = f'{SELECTED},alertname=~"MpAgent.+",alertstate="firing",severity="{severity}"'
    return f"count(ALERTS{{{matchers}}}) or vector(0)"


def _stat(number: int, title: str, description: str, expression: str, **more: object) -> Panel:
    return Panel(
        id=number,
        title=title,
        description=description,
        queries=(Query(expression, instant=True),),
        view=View.STAT,
        width=4,
        height=4,
        decimals=0,
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
            "Critical alerts",
            "Alerts of severity critical that are firing: a run is being lost or is lost.",
            _firing("critical"),
            steps=ANY_IS_BAD,
        ),
        _stat(
            3,
            "Warnings",
            "Alerts of severity warning that are firing: somebody should look today.",
            _firing("warning"),
            steps=ANY_IS_NOTABLE,
        ),
        _stat(
            4,
            "Runs that stand still",
            "Active runs whose step did not change for ten minutes. Evaluation and checkpointing "
            "count as well; the alert leaves them out.",
            f"count((changes({series('mp_agent_step')}[10m]) == 0) and on (run) ({_ACTIVE})) "
            "or vector(0)",
            steps=ANY_IS_NOTABLE,
        ),
        _stat(
            5,
            "Ranks covered",
            "Ranks whose numbers reach the merged ones, over all active runs. Below 100 % some "
            "rank or node does not report.",
            f"avg({by_run('mp_agent_coverage_ratio', 'min')} and on (run) ({_ACTIVE}))",
            unit="percentunit",
            steps=COVERAGE,
        ),
        _stat(
            6,
            "Steps skipped",
            "Share of the attempted steps that GradScaler skipped, over all runs and the time "
            "range. Healthy is below 1 in 2000.",
            f"sum(increase({series('mp_agent_skipped_steps_total')}[$__range])) "
            f"/ (sum(increase({series('mp_agent_steps_total')}[$__range])) > 0)",
            unit="percentunit",
            steps=above(overflow_warning="orange", overflow_critical="red"),
        ),
    ),
)

_COLUMNS = (
    Column(name="run", title="Run", link=_RUN_LINK),
    Column(name="cluster", title="cluster", width=110),
    Column(name="namespace", title="namespace", width=110),
    Column(name="job", title="job", width=110),
    Column(name="Value #A", title="State", texts=RUN_STATE, width=90),
    Column(name="Value #B", title="Step", unit="none", width=100),
    Column(name="Value #C", title="Steps/s", width=90, decimals=2),
    Column(name="Value #D", title="Loss", width=130, decimals=3),
    Column(
        name="Value #E",
        title="Gradient norm",
        width=120,
        steps=above(grad_norm_high="orange", grad_norm_extreme="red"),
    ),
    Column(
        name="Value #F",
        title="Loss scale",
        unit="none",
        width=100,
        steps=below(loss_scale_low="orange", loss_scale_floor="red"),
    ),
    Column(
        name="Value #G",
        title="Skipped",
        unit="percentunit",
        width=90,
        steps=above(overflow_warning="orange", overflow_critical="red"),
    ),
    Column(name="Value #H", title="Coverage", unit="percentunit", width=100, steps=COVERAGE),
    Column(name="Value #I", title="Worst alert", texts=ALERT_STATE, width=110),
    Column(name="Value #J", title="Worst condition", texts=ALERT_STATE, width=130),
)


def _table_query(expression: str, *, optional: bool = False) -> Query:
    return Query(expression, instant=True, optional=optional)


_RUNS = Row(
    title="Runs",
    panels=(
        Panel(
            id=10,
            title="Runs",
            description="One line per run, ended ones included while their series are in reach. "
            "Click a run for its story. Gradient norm, loss scale and skipped share have the "
            "colours of the alerts' thresholds.",
            view=View.TABLE,
            width=24,
            height=9,
            columns=_COLUMNS,
            queries=(
                _table_query(by_run("mp_agent_run_active")),
                _table_query(by_run("mp_agent_step")),
                _table_query(rate("mp_agent_steps_total")),
                _table_query(by_run("mp_agent_loss")),
                _table_query(by_run("mp_agent_grad_norm", where='optimizer=""')),
                _table_query(by_run("mp_agent_loss_scale", "min"), optional=True),
                _table_query(share_of_steps("mp_agent_skipped_steps_total")),
                _table_query(by_run("mp_agent_coverage_ratio", "min")),
                _table_query(conditions_by_severity(f"{SELECTED},", keep=RUN), optional=True),
                _table_query(detected_by_severity(keep=RUN), optional=True),
            ),
        ),
        Panel(
            id=11,
            title="Alerts in force",
            description="Each line is an alert of a run: red critical, orange warning, blue info.",
            view=View.TIMELINE,
            width=24,
            height=8,
            minimum=0,
            texts=ALERT_STATE,
            queries=(
                Query(
                    conditions_by_severity(f"{SELECTED},", keep=("run", "alertname")),
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
            description="How fast each run steps its optimizer, skipped steps included.",
            queries=(Query(rate("mp_agent_steps_total"), "{{run}}"),),
            unit=PER_SECOND,
            minimum=0,
        ),
        Panel(
            id=21,
            title="Loss",
            description=help_of("mp_agent_loss"),
            queries=(Query(by_run("mp_agent_loss"), "{{run}}"),),
        ),
        Panel(
            id=22,
            title="Gradient norm",
            description="Global norm before clipping, log scale. Dashed: where the explosion "
            "alerts begin.",
            queries=(Query(by_run("mp_agent_grad_norm", where='optimizer=""'), "{{run}}"),),
            log_base=10,
            steps=above(grad_norm_high="orange", grad_norm_extreme="red"),
            lines=True,
        ),
        Panel(
            id=23,
            title="Loss scale",
            description="GradScaler's scale, log2. Dashed: 128, below which FP16 has too little "
            "range left, and the floor.",
            queries=(Query(by_run("mp_agent_loss_scale", "min"), "{{run}}", optional=True),),
            log_base=2,
            minimum=0.5,
            steps=below(loss_scale_low="orange", loss_scale_floor="red"),
            lines=True,
        ),
        Panel(
            id=24,
            title="Skipped steps",
            description="Skipped per attempted step. Some at the start are GradScaler finding its "
            "scale.",
            queries=(Query(share_of_steps("mp_agent_skipped_steps_total"), "{{run}}"),),
            unit="percentunit",
            minimum=0,
            steps=above(overflow_warning="orange", overflow_critical="red"),
            lines=True,
        ),
        Panel(
            id=25,
            title="Coverage",
            description=help_of("mp_agent_coverage_ratio"),
            queries=(Query(by_run("mp_agent_coverage_ratio", "min"), "{{run}}"),),
            unit="percentunit",
            minimum=0,
            maximum=1,
        ),
    ),
)

FLEET = Board(
    uid="mp-agent-fleet",
    title="mp_agent / Fleet",
    description="All training runs of a cluster: state, progress and what is wrong.",
    rows=(_GLANCE, _RUNS, _PROGRESS),
)
