"""Each kind of expression gives in the process what real Prometheus gives on the same samples."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from math import floor
from pathlib import Path
from random import Random
from typing import get_args

import pytest
import yaml
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from mp_agent.alerting.detector.history import RANGE_FUNCTIONS, History
from mp_agent.alerting.detector.interpret import INTERPRETERS, Interpreter
from mp_agent.alerting.detector.readings import Key, Labels, Readings
from mp_agent.alerting.detector.vectors import Moment, Vector
from mp_agent.alerting.durations import duration
from mp_agent.alerting.expressions import (
    Arithmetic,
    Compare,
    Count,
    Either,
    Expression,
    Function,
    Length,
    Number,
    Predicate,
    Recorded,
    Seen,
    Series,
    Signal,
    Where,
    all_of,
    any_of,
    limit,
    unless,
)
from mp_agent.alerting.promql import promql
from mp_agent.alerting.values import values_in_force
from mp_agent.catalog.metrics import agent, run, training
from mp_agent.errors import CatalogError
from tests.alerting.examples.example import Value
from tests.alerting.promtool import assert_passes
from tests.subtests import each

MINUTES = 40
EVALUATED_AT = (0, 1, 7, 16, 29, 40)
CASES_PER_CALL = 12

_VALUES = values_in_force()
_FIVE, _TEN = duration("floor_window"), duration("incident_window")
_SCALE, _LOSS = Series(metric=training.LOSS_SCALE), Series(metric=run.LOSS)
_PHASES = Series(metric=run.PHASE, keep=("phase",))
_SKIPS = Count(metric=training.SKIPPED_STEPS, window=_FIVE)
_LOSS_ABOVE_3 = Compare(_LOSS, ">", Number(3))
_STEPS_RISING = Compare(_SKIPS, ">", Number(0))

EXPRESSIONS: dict[str, Expression] = {
    **{
        f"{function}, {before} before": Series(
            metric=run.LOSS, over=(function, _FIVE), before=(_FIVE,) * before
        )
        for function in get_args(Function)
        for before in (0, 1)
    },
    "the present value": _SCALE,
    "the value ten minutes ago": Series(metric=run.LOSS, before=(_FIVE, _FIVE)),
    "the smallest of several": Series(metric=run.PHASE, aggregate="min"),
    "the largest of several": Series(metric=run.PHASE),
    "kept labels": _PHASES,
    "an equal label": Series(metric=run.PHASE, where=(Where("phase", "=", "eval"),)),
    "another label": Series(metric=run.PHASE, where=(Where("phase", "!=", "eval"),)),
    "a label that matches": Series(metric=run.PHASE, where=(Where("phase", "=~", "e.*|x"),)),
    "a label that does not": Series(metric=run.PHASE, where=(Where("phase", "!~", "e.*|x"),)),
    "a threshold as label": Series(
        metric=run.PHASE, where=(Where("phase", "!=", limit("grad_norm_high")),)
    ),
    "a count": _SKIPS,
    "a count that ended before": Count(metric=training.SKIPPED_STEPS, window=_FIVE, before=(_TEN,)),
    "a sum": _SCALE + _LOSS,
    "a difference": _SCALE - _LOSS,
    "a product with a threshold": limit("overflow_skips") * _LOSS,
    "a quotient": _SCALE / _LOSS,
    "a quotient of counts": _SKIPS / Count(metric=run.STEPS, window=_FIVE),
    "a length": Arithmetic(Length(_FIVE), "*", _LOSS),
    "one or the other": Either(_SCALE, _LOSS),
    "a recorded signal": Recorded("run:mp_agent_loss:max", _LOSS) + Number(1),
    **{
        f"loss {operator} 3": Compare(_LOSS, operator, Number(3))
        for operator in ("<", "<=", ">", ">=", "==", "!=")
    },
    "a number below a signal": Compare(Number(3), "<", _LOSS),
    "signals compared": Compare(_LOSS, "<", _SCALE),
    "seen": Seen(_SCALE),
    "both": all_of(_LOSS_ABOVE_3, _STEPS_RISING),
    "at least one": any_of(_LOSS_ABOVE_3, _STEPS_RISING),
    "unless": unless(_LOSS_ABOVE_3, _STEPS_RISING),
    "kept labels and the run": all_of(Seen(_PHASES), _LOSS_ABOVE_3),
    "kept labels unless the run": unless(Seen(_PHASES), _LOSS_ABOVE_3),
    "kept labels, alike": unless(Seen(_PHASES), Compare(_PHASES, ">", Number(1))),
    "the run and kept labels": all_of(_LOSS_ABOVE_3, Compare(_PHASES, ">", Number(1))),
}

Tracks = dict[tuple[str, tuple[tuple[str, str], ...]], list[Value]]


@st.composite
def gauges(draw: st.DrawFn) -> list[Value]:
    """A series that may begin late, and may end."""
    values: list[Value] = [
        float(value)
        for value, times in draw(
            st.lists(st.tuples(st.integers(0, 5), st.integers(1, 12)), min_size=1, max_size=MINUTES)
        )
        for _ in range(times)
    ]
    begins = draw(st.sampled_from([0, 0, 3, 9]))
    whole: list[Value] = [*[None] * begins, *values, *[values[-1]] * MINUTES][: MINUTES + 1]
    ends = draw(st.sampled_from([None, None, 12, 25]))
    if ends is None:
        return whole
    return [*whole[:ends], "stale", *[None] * (MINUTES - ends)]


@st.composite
def counters(draw: st.DrawFn, begins: int) -> list[Value]:
    """A counter that is seen from a minute on, beginning with any value; resets come later on."""
    increments = draw(st.lists(st.sampled_from([0, 0, 0, 1, 4]), min_size=41, max_size=41))
    reset_at = draw(st.sampled_from([None, None, 30]))
    total, values = draw(st.integers(0, 3)), []
    for minute, increment in enumerate(increments):
        total = 0 if minute == reset_at else total + increment
        values.append(float(total))
    return [*[None] * begins, *values[begins:]]


@st.composite
def runs(draw: st.DrawFn) -> Tracks:
    phase, begins = run.PHASE.prometheus_name, draw(st.sampled_from([0, 0, 3, 9]))
    found: Tracks = {
        (agent.COUNTING.prometheus_name, ()): [
            None if minute < begins else 60.0 * (minute - begins) for minute in range(MINUTES + 1)
        ],
        (run.LOSS.prometheus_name, ()): draw(gauges()),
        (training.LOSS_SCALE.prometheus_name, ()): draw(gauges()),
        (training.SKIPPED_STEPS.prometheus_name, ()): draw(counters(begins)),
        (run.STEPS.prometheus_name, ()): draw(counters(begins)),
    }
    for name in draw(st.sets(st.sampled_from(["eval", "forward", "high"]))):
        found[phase, (("phase", name),)] = draw(gauges())
    return found


def readings_at(tracks: Tracks, minute: int) -> Iterator[tuple[Key, float]]:
    for key, values in tracks.items():
        if isinstance(value := values[minute], float):
            yield key, value


def worked_out(tracks: Tracks) -> dict[tuple[int, str], dict[tuple[tuple[str, str], ...], float]]:
    """Return, per minute and expression, the labels and values that the interpreter finds."""
    readings = Readings(period_seconds=10.0)
    interpreter = Interpreter(readings, _VALUES)
    ready = {name: interpreter.interpret(expression) for name, expression in EXPRESSIONS.items()}
    found = {}
    for minute in range(MINUTES + 1):
        readings.update(readings_at(tracks, minute), minute * 60.0)
        moment = Moment(minute * 60.0)
        for name, interpreted in ready.items():
            vector = interpreted.evaluate(moment)
            if minute in EVALUATED_AT:
                found[minute, name] = {
                    tuple(zip(interpreted.kept, key, strict=True)): value
                    for key, value in vector.items()
                }
        readings.begin_round()
    return found


def labels_text(labels: tuple[tuple[str, str], ...]) -> str:
    pairs = (("run", "r"), *labels)
    return "{" + ",".join(f'{name}="{value}"' for name, value in pairs) + "}"


def expected_by_promtool(name: str, tracks: Tracks) -> dict[str, object]:
    """Return a unit test that expects of Prometheus what the interpreter has found."""
    tests = []
    for (minute, title), vector in worked_out(tracks).items():
        text = promql(EXPRESSIONS[title], _VALUES).replace("run:mp_agent_loss:max", "mp_agent_loss")
        samples = [
            {
                "labels": labels_text(labels),
                "value": floor(value * 1e6 + 0.5) / 1e6,
            }
            for labels, value in vector.items()
        ]
        # Their sums may differ from ours in the last bit.
        expression = f'round(label_replace({text}, "run", "r", "", ""), 0.000001)'
        tests.append({"expr": expression, "eval_time": f"{minute}m", "exp_samples": samples})
    return {
        "name": name,
        "interval": "1m",
        "input_series": [
            {
                "series": metric + labels_text(labels),
                "values": " ".join("_" if v is None else str(v) for v in values),
            }
            for (metric, labels), values in tracks.items()
        ],
        "promql_expr_test": tests,
    }  # fmt: skip


class Cases(tuple[Tracks, ...]):
    """Runs that do not fill the screen when they fail."""

    def __repr__(self) -> str:
        return f"<{len(self)} runs>"


@pytest.mark.slow
@settings(
    max_examples=3,
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
@given(cases=st.lists(runs(), min_size=CASES_PER_CALL, max_size=CASES_PER_CALL).map(Cases))
def test_prometheus_comes_to_the_same_result_on_random_series(
    server: Callable[[str], Path], tmp_path: Path, cases: Cases
):
    document = {
        "evaluation_interval": "1m",
        "tests": [expected_by_promtool(f"case {i}", tracks) for i, tracks in enumerate(cases)],
    }
    file = tmp_path / "tests.yaml"
    file.write_text(yaml.safe_dump(document))
    assert_passes(server("promtool"), file)


def counted(
    values: dict[int, float], minute: int, *, began: int = 0, instances: tuple[str, ...] = ("",)
) -> float:
    """Return what `_SKIPS` is at a minute, given the counter's value at those it was seen at.

    began: the minute since which the node agent has been counting. instances: targets by which the
    same node agent is scraped.
    """
    readings = Readings(period_seconds=10.0)
    skips = Interpreter(readings, _VALUES).interpret(_SKIPS)
    for time in range(minute + 1):
        at = {
            training.SKIPPED_STEPS.prometheus_name: values.get(time),
            agent.COUNTING.prometheus_name: 60.0 * (time - began) if time in values else None,
        }
        found = [
            ((name, (("instance", instance),)), value)
            for name, value in at.items()
            for instance in instances
            if value is not None
        ]
        readings.update(found, time * 60.0)
    return skips.evaluate(Moment(minute * 60.0))[()]


def test_a_counter_that_comes_back_is_no_news_however_long_it_was_away():
    seen = dict.fromkeys((*range(5), *range(50, 60)), 7.0)
    assert counted(seen, 51) == 0
    assert counted({**seen, 51: 9.0}, 51) == 2
    assert counted(dict.fromkeys((*range(5), *range(200, 210)), 7.0), 201) == 0


def test_a_counter_that_is_first_seen_counts_from_0_only_while_its_agent_is_young():
    seen = {20: 3.0, 21: 4.0}
    assert counted(seen, 21, began=18) == 4
    assert counted(seen, 21, began=-600) == 1


def test_a_counter_that_is_born_and_reset_within_the_window_counts_both_parts():
    assert counted({1: 3.0, 2: 4.0, 3: 1.0}, 3) == 5


def test_a_target_that_is_scraped_twice_counts_once():
    assert counted({0: 0.0, 1: 3.0}, 1, instances=("a", "b")) == 3


def test_extremes_between_two_judgements_are_judged():
    readings = Readings(period_seconds=10.0)
    interpreter = Interpreter(readings, _VALUES)
    name = training.LOSS_SCALE.prometheus_name
    lowest, highest = (
        interpreter.interpret(Series(metric=training.LOSS_SCALE, aggregate=aggregate))
        for aggregate in ("min", "max")
    )
    for value in (8.0, 0.5, 64.0, 4.0):
        readings.update_some([((name, ()), value)], 0.0)
    moment = Moment(0.0)
    assert (lowest.evaluate(moment), highest.evaluate(moment)) == ({(): 0.5}, {(): 64.0})
    readings.begin_round()
    readings.update([((name, ()), 4.0)], 1.0)
    moment = Moment(1.0)
    assert (lowest.evaluate(moment), highest.evaluate(moment)) == ({(): 4.0}, {(): 4.0})


class _AlwaysChanged(Readings):
    def same(self, names: Iterable[str], changes: int) -> bool:
        return False


def _rarely_changing(random: Random, minutes: int) -> list[float | None]:
    values: list[float | None] = []
    while len(values) < minutes:
        values += [random.choice([None, 0.0, 2.0, 4.0])] * random.randint(1, 25)
    return values[:minutes]


@each("seed", range(8))
def test_what_is_kept_from_before_is_what_an_evaluation_finds(seed: int):
    """Of rounds with several readings, some of them not complete, and of series that end."""
    random, minutes = Random(seed), 160
    names = [m.prometheus_name for m in (run.LOSS, training.LOSS_SCALE, training.SKIPPED_STEPS)]
    keys: list[Key] = [(name, ()) for name in names]
    phases = ("eval", "forward", "high")
    keys += [(run.PHASE.prometheus_name, (("phase", phase),)) for phase in phases]
    tracks = {key: _rarely_changing(random, minutes) for key in keys}
    rounds = [(random.random() < 0.7, random.random() < 0.7) for _ in range(minutes)]
    changed_lately = Compare(Series(metric=run.LOSS, over=("changes", _FIVE)), ">", Number(0))
    expressions = (*EXPRESSIONS.values(), all_of(changed_lately, Seen(_SCALE)))
    kinds = (Readings(10.0), _AlwaysChanged(10.0))
    kept, always = (list(_vectors(kind, expressions, tracks, rounds)) for kind in kinds)
    assert kept == always


def _vectors(
    readings: Readings,
    expressions: Iterable[Expression],
    tracks: Mapping[Key, list[float | None]],
    rounds: list[tuple[bool, bool]],
) -> Iterator[tuple[int, Expression, Vector]]:
    """Yield what the expressions come to. rounds: whether a reading is complete, and judged."""
    interpreter = Interpreter(readings, _VALUES)
    ready = [(expression, interpreter.interpret(expression)) for expression in expressions]
    for minute, (complete, judged) in enumerate(rounds):
        take = readings.update if complete else readings.update_some
        standing = [(key, value[minute]) for key, value in tracks.items()]
        now = [(key, value) for key, value in standing if value is not None]
        take(now, minute * 60.0, minute)
        if judged:
            # One that asks for earlier steps has what is kept of it evaluated again.
            earlier = [Moment(minute * 60.0, minute - 1)] if minute % 20 == 0 else []
            for moment in (Moment(minute * 60.0), *earlier):
                for expression, interpreted in ready:
                    yield minute, expression, interpreted.evaluate(moment)
            readings.begin_round()


def test_nothing_is_evaluated_again_while_what_it_looks_at_stays_the_same(
    monkeypatch: pytest.MonkeyPatch,
):
    readings = Readings(period_seconds=10.0)
    interpreter = Interpreter(readings, _VALUES)
    both = interpreter.interpret(all_of(_LOSS_ABOVE_3, _STEPS_RISING))
    loss, skips = (m.prometheus_name for m in (run.LOSS, training.SKIPPED_STEPS))
    asked = []
    series = Readings.series

    def noted(own: Readings, name: str) -> Mapping[Labels, History]:
        asked.append(name)
        return series(own, name)

    monkeypatch.setattr(Readings, "series", noted)

    def names_asked_for(loss_now: float, skips_now: float, seconds: float) -> list[str]:
        asked.clear()
        readings.update([((loss, ()), loss_now), ((skips, ()), skips_now)], seconds)
        both.evaluate(Moment(seconds))
        readings.begin_round()
        return list(asked)

    assert names_asked_for(4.0, 0.0, 0.0) == [loss, skips]
    assert names_asked_for(4.0, 0.0, 10.0) == []
    assert names_asked_for(4.5, 0.0, 20.0) == [loss]
    assert names_asked_for(4.5, 1.0, 30.0)[0] == skips
    assert names_asked_for(4.5, 1.0, 40.0)[0] == skips, "a rise is forgotten by time alone"


def test_every_node_and_every_function_has_an_interpreter():
    nodes = [kind for base in (Signal, Predicate) for kind in base.__subclasses__()]
    kinds = {kind.__name__ for kind in nodes if kind.__module__ == Signal.__module__}
    assert kinds <= {kind.__name__ for kind in INTERPRETERS}
    assert set(RANGE_FUNCTIONS) == set(get_args(Function))


def test_a_node_without_an_interpreter_is_refused_by_name():
    class Unheard(Expression):
        pass

    interpreter = Interpreter(Readings(10.0), _VALUES)
    with pytest.raises(CatalogError, match="Unheard has no interpreter"):
        interpreter.interpret(Unheard())
    with pytest.raises(CatalogError, match="idelta has no interpreter"):
        interpreter.interpret(Series(metric=run.LOSS, over=("idelta", _FIVE)))  # type: ignore[arg-type]
