"""The last row of Run: how fast it goes, and what it is doing."""

from grafana.panel import PER_SECOND, Panel, Query, Row, View, help_of
from grafana.queries import RUN, by_run, quantile, rate, series
from mp_agent.alerting.conditions.ranks import RANK_STRAGGLER
from mp_agent.alerting.conditions.run import RUN_STALLED
from mp_agent.records.steps import Phase

_OF_A_STEP = "|".join(
    phase.name.lower() for phase in (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER)
)
_TRAINING = series("mp_agent_phase_info", f'phase=~"{_OF_A_STEP}"')
_OTHERWISE = series("mp_agent_phase_info", f'phase!~"{_OF_A_STEP}"')
_PHASES = (
    f'max by (phase) ({_OTHERWISE}) or label_replace(max({_TRAINING}), "phase", "training", "", "")'
)

PACE = Row(
    title="Pace",
    panels=(
        Panel(
            id=40,
            title="Step time",
            description=help_of("mp_agent_step_duration_seconds"),
            width=8,
            unit="s",
            minimum=0,
            queries=(
                Query(quantile("mp_agent_step_duration_seconds", 0.5), "median"),
                Query(quantile("mp_agent_step_duration_seconds", 0.99), "99th percentile"),
                Query(by_run("mp_agent_step_usual_seconds"), "median of 64 steps", optional=True),
            ),
        ),
        Panel(
            id=41,
            title="Steps per second",
            description="Optimizer steps per second, including skipped ones.",
            width=8,
            unit=PER_SECOND,
            minimum=0,
            queries=(Query(rate("mp_agent_steps_total"), "steps"),),
            runbooks=(RUN_STALLED,),
        ),
        Panel(
            id=42,
            title="Tokens per second",
            description=help_of("mp_agent_tokens_total"),
            width=8,
            unit=PER_SECOND,
            minimum=0,
            soft_maximum=1,
            queries=(Query(rate("mp_agent_tokens_total"), "tokens"),),
        ),
        Panel(
            id=45,
            title="Step time by part",
            description=help_of("mp_agent_step_part_seconds_total")
            + " Per step, by the rank that takes longest for the part.",
            width=24,
            unit="s",
            minimum=0,
            nothing="Needs measure_step_parts",
            queries=(
                Query(
                    f"{rate('mp_agent_step_part_seconds_total', keep=('part',))} / on "
                    f"({', '.join(RUN)}) group_left () ({rate('mp_agent_steps_total')} > 0)",
                    "{{part}}",
                    optional=True,
                ),
            ),
            runbooks=(RANK_STRAGGLER,),
        ),
        Panel(
            id=43,
            title="Phase",
            description=help_of("mp_agent_phase_info")
            + " Forward pass, backward pass and optimizer are shown as training.",
            view=View.TIMELINE,
            width=16,
            height=6,
            queries=(Query(_PHASES, "{{phase}}"),),
        ),
        Panel(
            id=44,
            title="Last step",
            description=help_of("mp_agent_last_step_timestamp_seconds"),
            view=View.STAT,
            width=8,
            height=6,
            unit="dateTimeFromNow",
            queries=(
                Query(f"{by_run('mp_agent_last_step_timestamp_seconds')} * 1000", instant=True),
            ),
        ),
    ),
)
