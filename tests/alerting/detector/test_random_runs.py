"""Runs made up at random: rules and detectors find the same alerts at every minute.

One call of promtool judges many runs, since starting it costs more than what it does.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from mp_agent.alerting.conditions import CONDITIONS, GROUPS
from mp_agent.alerting.expressions import limit
from mp_agent.alerting.rules import RULES_FILE, render_rules
from mp_agent.alerting.values import values_in_force
from mp_agent.catalog.metrics import gradients, run, training
from tests.alerting.detector.replay import Alert, Tracks, replay, tracks_of
from tests.alerting.examples.example import RUN, TARGET, Example, Track
from tests.alerting.promtool import assert_passes, notation

MINUTES = 60
RUNS_PER_CALL = 6

JUDGED = (
    "MpAgentGradientExplosion",
    "MpAgentGradientVanishing",
    "MpAgentLossScaleAtFloor",
    "MpAgentLossScaleLowAndFalling",
    "MpAgentOverflowRatioHigh",
    "MpAgentRunStalled",
)

_VALUES = values_in_force()
_CHOSEN = {
    group: tuple(condition for condition in conditions if condition.name in JUDGED)
    for group, conditions in GROUPS.items()
}


def stretches(values: list[float]) -> st.SearchStrategy[tuple[float, ...]]:
    """Values that stand for some minutes each."""
    part = st.tuples(st.sampled_from(values), st.integers(1, 25))
    return st.lists(part, min_size=1, max_size=8).map(
        lambda parts: tuple(v for v, times in parts for _ in range(times))[: MINUTES + 1]
    )


def counts(increments: list[float]) -> st.SearchStrategy[tuple[float, ...]]:
    """A counter that rises by so much from minute to minute."""

    def added_up(rises: tuple[float, ...]) -> tuple[float, ...]:
        return tuple(sum(rises[: minute + 1]) for minute in range(len(rises)))

    return stretches(increments).map(added_up)


def jittered(values: tuple[float, ...]) -> tuple[float, ...]:
    """Return values no two of which are equal: ties of sums are decided by their rounding."""
    return tuple(value + (minute * 7 % 61) / 1_000 for minute, value in enumerate(values))


@st.composite
def runs(draw: st.DrawFn) -> Tracks:
    skipped = draw(counts([0, 0, 0, 1, 12]))
    norms = draw(stretches([1.0, 1.0, 0.005, 0.0005, 1e-7]))
    steps = draw(counts([60, 60, 60, 2, 0]))
    bounds = [
        Track(metric, draw(counts([0, 0, 0, 1])), {"bound": limit(name)})
        for metric in (gradients.GRAD_NORM_EXCEEDED, gradients.GRAD_NORM_UNCLIPPED)
        for name in ("grad_norm_high", "grad_norm_extreme")
    ]
    tracks = (
        Track(training.SKIPPED_STEPS, skipped),
        Track(training.LOSS_SCALE_DECREASES, skipped),
        Track(training.LOSS_SCALE_FLOOR_STALLS, draw(counts([0, 0, 2]))),
        Track(training.LOSS_SCALE, draw(stretches([65536, 512, 64, 1, 0.5]))),
        Track(gradients.GRAD_NORM, norms),
        Track(gradients.GRAD_NORM_WINDOW_MAX, norms),
        Track(gradients.GRAD_FINITE, draw(stretches([1, 1, 1, 0]))),
        Track(run.COVERAGE, draw(stretches([1, 1, 1, 0.5]))),
        Track(training.LOSS_SPIKE_STEPS, draw(counts([0, 0, 0, 1]))),
        Track(run.LOSS, draw(stretches([2.0, 2.1, 1.9, 9.0]).map(jittered))),
        Track(run.STEP, tuple(5000 + step for step in steps)),
        Track(run.STEPS, tuple(5000 + step for step in steps)),
        *bounds,
    )
    return tracks_of(Example(title="made up", minutes=MINUTES, tracks=tracks), _VALUES)


def unit_test(name: str, tracks: Tracks) -> dict[str, object]:
    """Expect of Prometheus, minute by minute, the alerts that the detectors find."""
    conditions = [condition for condition in CONDITIONS if condition.name in JUDGED]
    replayed = replay(tracks, MINUTES, _VALUES, conditions)
    target = f'namespace="{TARGET["namespace"]}",job="{TARGET["job"]}",run="{RUN}"'
    return {
        "name": name,
        "interval": "1m",
        "input_series": [
            {"series": _series(metric, labels), "values": notation(tuple(values))}
            for (metric, labels), values in tracks.items()
        ],
        "promql_expr_test": [
            {
                "expr": 'count by (alertname, severity, namespace, job, run) '
                '(ALERTS{alertstate="firing"})',
                "eval_time": f"{minute}m",
                "exp_samples": [
                    {"labels": f"{{{_names(alert)},{target}}}", "value": 1} for alert in firing
                ],
            }
            for minute, firing in enumerate(replayed.firing)
        ],
    }  # fmt: skip


def _names(alert: Alert) -> str:
    return f'alertname="{alert.name}",severity="{alert.severity}"'


def _series(metric: str, labels: tuple[tuple[str, str], ...]) -> str:
    whole = {**TARGET, **({} if metric == "up" else {"run": RUN}), **dict(labels)}
    return metric + "{" + ",".join(f'{key}="{value}"' for key, value in whole.items()) + "}"


class Cases(tuple[Tracks, ...]):
    """Runs that do not fill the screen when they fail."""

    def __repr__(self) -> str:
        return f"<{len(self)} runs>"


@pytest.mark.slow
@settings(
    max_examples=2,
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
@given(cases=st.lists(runs(), min_size=RUNS_PER_CALL, max_size=RUNS_PER_CALL).map(Cases))
def test_rules_and_detectors_find_the_same(
    server: Callable[[str], Path], tmp_path: Path, cases: Cases
):
    (tmp_path / RULES_FILE).write_text(render_rules(_VALUES, groups=_CHOSEN))
    document = {
        "rule_files": [RULES_FILE],
        "evaluation_interval": "1m",
        "tests": [unit_test(f"run {index}", tracks) for index, tracks in enumerate(cases)],
    }
    (tmp_path / "tests.yaml").write_text(yaml.safe_dump(document))
    assert_passes(server("promtool"), tmp_path / "tests.yaml")
