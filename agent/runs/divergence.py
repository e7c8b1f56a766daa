"""Where two runs part: their numbers by step, and the gradient norms of their layers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil, inf, isfinite
from statistics import median

from mp_agent.errors import CompareError
from mp_agent.flight.postmortem.diagnosis import RunHistory
from mp_agent.records.merged import MergedStep
from mp_agent.records.schema import TRAINED_RATIO

QUANTITIES = {
    "loss": "loss",
    "grad_norm": "gradient norm",
    "grad_abs_max": "largest gradient",
    "learning_rate": "learning rate",
}
"""What is compared at equal steps, by the name that JSON has."""

MARKS = {
    "loss_nonfinite": "loss NaN or Inf",
    "gradients_nonfinite": "gradients NaN or Inf",
    "skipped": "step skipped",
}
"""What only one of the runs may have at a step."""


@dataclass(frozen=True, slots=True)
class RunStep:
    """One step: quantities that were observed, and marks."""

    values: Mapping[str, float]
    marks: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSeries:
    """A run by the trainer's number of its steps; of a step that was trained twice, the later."""

    name: str
    source: str
    steps: Mapping[int, RunStep]
    layers: Mapping[int, Mapping[str, float]] = field(default_factory=dict)
    """Gradient norms by layer at sampled steps; NaN where a layer has NaN or Inf."""
    facts: Mapping[str, str] = field(default_factory=dict)
    scraped_steps: float = 0.0
    """Steps from one scrape to the next, where only those that a scrape saw are there; else 0."""


def series_of_history(
    name: str, source: str, history: RunHistory, facts: Mapping[str, str]
) -> RunSeries:
    """Return the series of a run whose ranks have been merged."""
    numbers = {step.sequence: step.step for step in history.steps}
    layers = {}
    for table in history.tables:
        if table.sequence in numbers and table.complete:
            norms = table.column("sum_squares").clip(min=0.0) ** 0.5
            norms[table.nonfinite > 0] = float("nan")
            layers[numbers[table.sequence]] = dict(zip(table.names, norms.tolist(), strict=True))
    return RunSeries(
        name=name,
        source=source,
        steps={step.step: _step(step) for step in history.steps},
        layers=layers,
        facts=facts,
    )


def _step(step: MergedStep) -> RunStep:
    judged = step.gradients_judged
    observed = {
        "loss": step.get("loss"),
        "grad_norm": step.grad_norm if judged else None,
        "grad_abs_max": step.get("abs_max") if judged else None,
        "learning_rate": step.get("learning_rate"),
    }
    marks = {
        "loss_nonfinite": step.flag("loss_nonfinite"),
        "gradients_nonfinite": step.gradient_nonfinite_elements > 0,
        "skipped": step.skipped,
    }
    return RunStep(
        {name: value for name, value in observed.items() if value is not None},
        frozenset(name for name, holds in marks.items() if holds),
    )


def interval_steps(first: RunSeries, second: RunSeries) -> int:
    """Return within how many steps two runs can be matched; 1: exactly."""
    return max(1, ceil(max(first.scraped_steps, second.scraped_steps)))


def aligned(run: RunSeries, interval: int) -> RunSeries:
    """Return a run with a step per interval, called by its first; the same run for 1.

    Values are medians over the steps of the interval, and it has the marks of all of them.
    """
    if interval == 1:
        return run
    groups: dict[int, list[RunStep]] = {}
    for number in sorted(run.steps):
        groups.setdefault(number // interval * interval, []).append(run.steps[number])
    return replace(run, steps={begin: _joined(steps) for begin, steps in groups.items()})


def _joined(steps: list[RunStep]) -> RunStep:
    values: dict[str, list[float]] = {}
    for step in steps:
        for quantity, value in step.values.items():
            values.setdefault(quantity, []).append(value)
    medians: Mapping[str, float] = {name: median(found) for name, found in values.items()}
    return RunStep(medians, frozenset().union(*(step.marks for step in steps)))


FLOORS: Mapping[str, float] = {
    "loss": 0.01,
    "grad_norm": 0.1,
    "grad_abs_max": 0.25,
    "learning_rate": 1e-6,
}
"""Relative differences below which runs never count as apart."""
LAYER_FLOOR = 0.25
CONSECUTIVE_STEPS = 5
"""Common steps in a row for which, or up to the end, a difference has to last."""
TABLES_RUNNING = 2

_USUAL_STEPS = 20
_USUAL_DEVIATIONS = 6.0
_MAD_TO_DEVIATION = 1.4826
_LIMIT_FLOORS_MAX = 10.0
"""A limit is at most so many floors: runs that start apart would set it too high otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Departure:
    """Where a quantity, or the gradient norm of a layer, of one run leaves that of the other."""

    quantity: str
    """A key of QUANTITIES or MARKS, or `layer_grad_norm`."""
    layer: str = ""
    step: int
    first: float | None
    """Value of the first run; None where it has none."""
    second: float | None
    difference: float
    """Relative: |a − b| / max(|a|, |b|); Inf where only one run has the mark."""
    limit: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RunComparison:
    """Two runs at equal steps."""

    first: RunSeries
    second: RunSeries
    steps: tuple[int, ...]
    """Steps that both have, ascending."""
    differences: Mapping[str, tuple[float | None, ...]]
    """Relative, by quantity; one for each of `steps`."""
    limits: Mapping[str, float]
    departures: tuple[Departure, ...]
    """Departures by step, one for each quantity and mark."""
    layers: tuple[Departure, ...]
    """Departures of layers by step, then by difference."""
    notes: tuple[str, ...]

    @property
    def departure(self) -> Departure | None:
        """Return where the runs part first; None if they never do."""
        return self.departures[0] if self.departures else None


def compare_series(first: RunSeries, second: RunSeries) -> RunComparison:
    """Return the comparison of two runs. Raises CompareError when they have no step in common.

    The limit of a quantity is the usual difference over the first 20 common steps (median plus six
    deviations, from the median absolute deviation), between one and ten times its floor. Where
    only scrapes saw the steps, they are matched within the distance of two scrapes.
    """
    interval = interval_steps(first, second)
    first, second = aligned(first, interval), aligned(second, interval)
    steps = sorted(first.steps.keys() & second.steps.keys())
    if not steps:
        raise CompareError(f"no step in common: {_range(first)}, {_range(second)}")
    differences, limits, departures = {}, {}, []
    for quantity in QUANTITIES:
        values = [
            relative_difference(*(run.steps[step].values.get(quantity) for run in (first, second)))
            for step in steps
        ]
        if all(value is None for value in values):
            continue
        differences[quantity] = tuple(values)
        limits[quantity] = limit_of(values, FLOORS[quantity])
        index = first_lasting(values, limits[quantity], CONSECUTIVE_STEPS)
        if index is not None:
            pair = [run.steps[steps[index]].values.get(quantity) for run in (first, second)]
            departures.append(
                Departure(
                    quantity=quantity,
                    step=steps[index],
                    first=pair[0],
                    second=pair[1],
                    difference=values[index] or 0.0,
                    limit=limits[quantity],
                )
            )
    departures += _marks(first, second, steps)
    departures.sort(key=lambda one: (one.step, -one.difference))
    return RunComparison(
        first=first,
        second=second,
        steps=tuple(steps),
        differences=differences,
        limits=limits,
        departures=tuple(departures),
        layers=_layers(first, second),
        notes=(*_notes_of_scrapes(interval), *_notes(first, second, departures)),
    )


def relative_difference(first: float | None, second: float | None) -> float | None:
    """Return |a − b| / max(|a|, |b|); 0 where both are zero, None where a value is missing."""
    if first is None or second is None or not (isfinite(first) and isfinite(second)):
        return None
    largest = max(abs(first), abs(second))
    # Each by itself: the difference of two huge numbers may not be a float.
    return 0.0 if largest == 0.0 else abs(first / largest - second / largest)


def limit_of(differences: Sequence[float | None], floor: float) -> float:
    """Return the difference from which on two runs count as apart."""
    known = [value for value in differences if value is not None]
    usual = known[: min(_USUAL_STEPS, max(1, len(known) // 4))]
    if not usual:
        return floor
    middle = median(usual)
    spread = median(abs(value - middle) for value in usual) * _MAD_TO_DEVIATION
    return max(floor, min(middle + _USUAL_DEVIATIONS * spread, _LIMIT_FLOORS_MAX * floor))


def first_lasting(differences: Sequence[float | None], limit: float, running: int) -> int | None:
    """Return the index from which on differences exceed a limit, as often as asked for in a row.

    Missing ones neither count nor interrupt. At the end fewer do, if they are at least two.
    """
    begin, count = None, 0
    for index, value in enumerate(differences):
        if value is None:
            continue
        if value <= limit:
            begin, count = None, 0
            continue
        begin = index if begin is None else begin
        count += 1
        if count >= running:
            return begin
    return begin if count >= min(2, running) else None


def _marks(first: RunSeries, second: RunSeries, steps: Sequence[int]) -> list[Departure]:
    found = []
    for mark in MARKS:
        held = [[mark in run.steps[step].marks for run in (first, second)] for step in steps]
        index = next((at for at, (one, other) in enumerate(held) if one != other), None)
        if index is not None:
            one, other = held[index]
            found.append(
                Departure(
                    quantity=mark,
                    step=steps[index],
                    first=float(one),
                    second=float(other),
                    difference=inf,
                    limit=0.0,
                )
            )
    return found


def _layers(first: RunSeries, second: RunSeries) -> tuple[Departure, ...]:
    steps = sorted(first.layers.keys() & second.layers.keys())
    names = dict.fromkeys(name for step in steps for name in first.layers[step])
    found = []
    for name in names:
        pairs = [(first.layers[step].get(name), second.layers[step].get(name)) for step in steps]
        values = [_layer_difference(*pair) for pair in pairs]
        limit = limit_of([v for v in values if v != inf], LAYER_FLOOR)
        index = first_lasting(values, limit, TABLES_RUNNING)
        lost = next((at for at, value in enumerate(values) if value == inf), None)
        index = min((one for one in (index, lost) if one is not None), default=None)
        if index is not None:
            found.append(
                Departure(
                    quantity="layer_grad_norm",
                    layer=name,
                    step=steps[index],
                    first=pairs[index][0],
                    second=pairs[index][1],
                    difference=values[index] or 0.0,
                    limit=limit,
                )
            )
    return tuple(sorted(found, key=lambda one: (one.step, -one.difference)))


def _layer_difference(first: float | None, second: float | None) -> float | None:
    """Return the relative difference; Inf where a layer of only one run has NaN or Inf."""
    if first is None or second is None:
        return None
    if isfinite(first) != isfinite(second):
        return inf
    return relative_difference(first, second)


def _notes_of_scrapes(interval: int) -> list[str]:
    if interval == 1:
        return []
    return [
        f"Steps are matched within {interval}, which is how far apart the scrapes are: a step "
        "stands for those up to the next one."
    ]


def _notes(first: RunSeries, second: RunSeries, departures: Sequence[Departure]) -> list[str]:
    notes = []
    if not first.layers.keys() & second.layers.keys():
        notes.append("No layers were compared: no step at which both runs measured theirs.")
    if any(one.quantity == "learning_rate" for one in departures):
        notes.append("The learning rates differ: the runs do not train alike, whatever precision.")
    for fact in sorted(first.facts.keys() & second.facts.keys()):
        if first.facts[fact] != second.facts[fact]:
            notes.append(_note_of_fact(fact, first.facts[fact], second.facts[fact]))
    return notes


def _note_of_fact(fact: str, first: str, second: str) -> str:
    if fact == TRAINED_RATIO:
        return f"{_percent(first)} of the weights are trained against {_percent(second)}"
    return f"{fact}: {first} against {second}"


def _percent(ratio: str) -> str:
    return f"{100.0 * float(ratio):.3g} %"


def _range(run: RunSeries) -> str:
    if not run.steps:
        return f"{run.source} has none"
    return f"{run.source} has {min(run.steps)} to {max(run.steps)}"
