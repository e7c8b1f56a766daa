"""The first rows of Ranks: how many are in trouble, and which."""

from grafana.panel import Column, Panel, Query, Row, View, above, help_of
from grafana.queries import RUN, aggregated, by_run, recorded, series
from grafana.style import ANY_IS_NOTABLE, COVERAGE
from mp_agent.alerting.conditions.agent import COVERAGE_LOW
from mp_agent.alerting.conditions.ranks import RANK_STALLED, RANK_STRAGGLER, REPLICA_DIVERGENCE

_ACTIVE = f"({by_run('mp_agent_run_active')} == 1)"
_UP = aggregated(recorded("run:mp_agent_rank_up:sum"), "max")
_SEEN = aggregated(recorded("run:mp_agent_rank_up:count"), "max")
_OF_ACTIVE = f"and on ({', '.join(RUN)}) {_ACTIVE}"
SLOWEST = (
    f"{by_run('mp_agent_straggler_slowdown')} * on ({', '.join(RUN)}) group_right "
    f"{by_run('mp_agent_straggler_info', keep=('rank',))}"
)
"""The slowdown of the slowest rank, with its name."""


def _stat(number: int, title: str, description: str, query: Query, **more: object) -> Panel:
    return Panel(
        id=number,
        title=title,
        description=description,
        queries=(query,),
        view=View.STAT,
        width=4,
        height=4,
        **more,  # type: ignore[arg-type]
    )


GLANCE = Row(
    title="At a glance",
    panels=(
        _stat(
            1,
            "Ranks up",
            "Ranks whose process is alive, of all observed ranks.",
            Query(f"sum({_UP})", instant=True),
            decimals=0,
        ),
        _stat(
            2,
            "Ranks gone",
            "Ranks whose process has ended while the run continues.",
            Query(f"sum(({_SEEN} - {_UP}) {_OF_ACTIVE}) or vector(0)", instant=True),
            decimals=0,
            steps=ANY_IS_NOTABLE,
        ),
        _stat(
            3,
            "Missing ranks",
            help_of("mp_agent_ranks_missing"),
            Query(f"sum({series('mp_agent_ranks_missing')}) or vector(0)", instant=True),
            decimals=0,
            steps=ANY_IS_NOTABLE,
            runbooks=(COVERAGE_LOW,),
        ),
        _stat(
            4,
            "Coverage",
            help_of("mp_agent_coverage_ratio"),
            Query(by_run("mp_agent_coverage_ratio", "min")),
            unit="percentunit",
            steps=COVERAGE,
            runbooks=(COVERAGE_LOW,),
        ),
        _stat(
            5,
            "Lagging ranks",
            help_of("mp_agent_ranks_lagging"),
            Query(by_run("mp_agent_ranks_lagging")),
            decimals=0,
            steps=ANY_IS_NOTABLE,
            runbooks=(RANK_STALLED,),
        ),
        _stat(
            6,
            "Slowest rank",
            "The rank with the longest time before its first collective; orange if it is slow "
            "enough to be a straggler.",
            Query(SLOWEST, "{{rank}}", instant=True, optional=True),
            steps=above(straggler_ratio="orange"),
            label="rank",
            runbooks=(RANK_STRAGGLER,),
        ),
    ),
)


def _named(
    number: int, title: str, name: str, columns: tuple[Column, ...], **more: object
) -> Panel:
    """Return a table of the ranks that an info metric names, twenty at most."""
    named = by_run(name, keep=tuple(column.name for column in columns))
    return Panel(
        id=number,
        title=title,
        description=help_of(name) + " Twenty lines at most. Empty if healthy.",
        view=View.TABLE,
        width=8,
        height=5,
        nothing="None",
        columns=columns,
        sort_by=tuple(column.title for column in columns if column.number),
        smallest_first=True,
        queries=(Query(f"topk(20, {named})", instant=True, optional=True),),
        **more,  # type: ignore[arg-type]
    )


NAMES = Row(
    title="Which ranks",
    panels=(
        _named(
            50,
            "Which lag",
            "mp_agent_lagging_rank_info",
            (
                Column(name="rank", title="Rank", width=100, number=True),
                Column(name="phase", title="Where it stands"),
            ),
            runbooks=(RANK_STALLED,),
        ),
        _named(
            51,
            "Which are missing",
            "mp_agent_missing_rank_info",
            (Column(name="rank", title="Rank", number=True),),
            runbooks=(COVERAGE_LOW,),
        ),
        _named(
            52,
            "Which differ",
            "mp_agent_divergent_ranks_info",
            (
                Column(name="kind", title="What differs", width=120),
                Column(name="step", title="Step", width=100),
                Column(name="ranks", title="Ranks"),
            ),
            runbooks=(REPLICA_DIVERGENCE,),
        ),
    ),
)
