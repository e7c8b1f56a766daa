"""`mp-agent baseline` and `mp-agent compare RUN --baseline FILE`: bands of good runs, and verdicts.

A band is as wide as medians over a window scatter, within a run and between runs; and it holds what
good runs were at somewhat earlier and later steps, since another seed may be ahead or behind.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, exp, floor, log, sqrt
from pathlib import Path
from statistics import fmean, median

import click
import msgspec
from rich.console import Console as AnyConsole
from rich.text import Text

from mp_agent.catalog.metric import Scope
from mp_agent.errors import CompareError, MpAgentError
from mp_agent.flight.record.evidence import Evidence
from mp_agent.node.accounting.accumulator import Accumulator, CounterStore
from mp_agent.node.accounting.baseline import FIRST_SAMPLES, layer_norm, step_values
from mp_agent.node.accounting.progress import Progress
from mp_agent.node.cluster.root import MergedTable
from mp_agent.node.commands.flight import evidence_at
from mp_agent.node.flight.replay import merged_items
from mp_agent.node.run.state import StepIngest
from mp_agent.output import Console, OutputPath, keep_inputs, refuse, write_whole
from mp_agent.records.baseline import (
    GRAD_NORM,
    QUANTITIES,
    WINDOWS_STEPS,
    Band,
    Baseline,
    BaselineDeparture,
    known_facts,
    read_baseline,
)
from mp_agent.records.columns import GRADIENTS
from mp_agent.records.merged import MergedStep
from mp_agent.report import terminal
from mp_agent.report.content import picked, written
from mp_agent.report.numbers import counted
from mp_agent.settings import load_settings

_AHEAD = 1.25
"""Factor of the step by which another seed may be ahead or behind."""
_NEIGHBOURS = 2
"""Windows on both sides in which the scatter of steps is measured."""
_SPREAD_WINDOWS = 4
_SCATTERS = 4.0
_LAYER_SCATTERS = 6.0
_SPREADS = {1: 0.0, 2: 6.0, 3: 4.5}
"""Deviations between the runs, by how many there are; of few, their deviation is often low."""
_SPREADS_OF_MANY = 4.0
_OF_MEDIANS = 1.2533
"""Standard deviation of a median, times the root of the number of values, of that of a value."""
_MAD_TO_DEVIATION = 1.4826
_FLOORS = {GRAD_NORM: log(1.3), "learning_rate": log(1.02), "clip_max_norm": 0.0}
"""Least half width of a band, as a difference of logarithms."""
_LOSS_FLOORS = {1: 0.1, 2: 0.05}
_LOSS_FLOOR_OF_MANY = 0.03
"""The same of the loss, relative, by the number of runs: of one, nothing shows what a seed does."""
_LAYER_FLOOR = log(2.0)
_ROUNDING = 1e-6

Series = Mapping[int, float]
"""Values by step, or medians by window."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GoodRun:
    """What a baseline takes from a run."""

    name: str
    world_size: int
    facts: Mapping[str, str]
    quantities: Mapping[str, Series]
    layers: Mapping[str, float]
    """Elements of what it trains; 0 where that is not known."""
    first_layers: frozenset[str]
    """Those of the first samples."""
    layer_norms: Mapping[str, Series]


def good_run(evidence: Evidence) -> GoodRun:
    """Return what a baseline takes from a record."""
    quantities: dict[str, dict[int, float]] = {name: {} for name in QUANTITIES}
    layers: dict[str, float] = {}
    norms: dict[str, dict[int, float]] = {}
    numbers: dict[int, int] = {}
    first: frozenset[str] = frozenset()
    samples = 0
    for item in merged_items(evidence.ranks):
        if isinstance(item, MergedStep):
            numbers[item.sequence] = item.step
            for name, value in step_values(item).items():
                quantities[name][item.step] = value
            continue
        table = item.families.get(GRADIENTS.name)
        if table is None or not table.complete or item.sequence not in numbers:
            continue
        samples += 1
        first |= set(table.names) if samples <= FIRST_SAMPLES else set()
        for view in table.views(step_judged=True, step=numbers[item.sequence]):
            own = view.values.get("elements", 0.0) if view.judged else 0.0
            layers[view.name] = max(own, layers.get(view.name, 0.0))
            norm = layer_norm(view.values) if view.judged else None
            if norm:
                norms.setdefault(view.name, {})[view.step] = norm
    return GoodRun(
        name=evidence.identity.run,
        world_size=evidence.identity.world_size,
        facts=known_facts(evidence.facts),
        quantities=quantities,
        layers=layers,
        first_layers=first,
        layer_norms=norms,
    )


def baseline_of(runs: Sequence[GoodRun]) -> Baseline:
    """Return the baseline of one or more good runs. Raises CompareError if they hold nothing."""
    if not any(run.layers or any(run.quantities.values()) for run in runs):
        raise CompareError("no step of these runs was measured: there is nothing to compare with")
    everywhere = runs[0].first_layers.intersection(*(run.first_layers for run in runs[1:]))
    anywhere = {name for run in runs for name in run.layers}
    bands = {
        name: tuple(
            _bands_of_windows(name, [run.quantities[name] for run in runs], steps)
            for steps in WINDOWS_STEPS
        )
        for name in QUANTITIES
    }
    layer_bands = {
        layer: _bands_of_samples([run.layer_norms.get(layer, {}) for run in runs])
        for layer in sorted(everywhere)
    }
    return Baseline(
        runs=tuple(run.name for run in runs),
        world_sizes=tuple(sorted({run.world_size for run in runs})),
        layers={name: _elements(name, runs) for name in runs[0].layers if name in everywhere},
        other_layers=tuple(sorted(anywhere - everywhere)),
        facts={
            name: tuple(dict.fromkeys(run.facts[name] for run in runs))
            for name in runs[0].facts
            if all(name in run.facts for run in runs)
        },
        bands={name: found for name, found in bands.items() if any(found)},
        layer_bands={name: found for name, found in layer_bands.items() if found},
    )


def _elements(layer: str, runs: Sequence[GoodRun]) -> float:
    found = {run.layers[layer] for run in runs if run.layers[layer]}
    return found.pop() if len(found) == 1 else 0.0


def _bands_of_windows(quantity: str, runs: Sequence[Series], steps: int) -> tuple[Band, ...]:
    """Return a band for each window of so many steps that a run has in full."""
    linear = quantity == "loss"
    scaled = [
        {
            step: value if linear else log(value)
            for step, value in run.items()
            if linear or value > 0
        }
        for run in runs
    ]
    windows = [_windows(run, steps) for run in scaled]
    medians = [{index: median(own) for index, own in run.items()} for run in windows]
    bands = []
    for index in sorted({index for run in medians for index in run}):
        low, high = _reach(medians, index)
        least = _FLOORS.get(quantity, 0.0)
        if linear:
            least = _LOSS_FLOORS.get(len(runs), _LOSS_FLOOR_OF_MANY) * max(abs(low), abs(high))
        margin = max(
            _SCATTERS * _OF_MEDIANS * _scatter(windows, index) / sqrt(steps),
            _spread(medians, index),
            least,
        )
        first = index * steps + 1
        bands.append(_band(first, first + steps - 1, low - margin, high + margin, linear))
    return tuple(bands)


def _band(first: int, last: int, low: float, high: float, linear: bool = False) -> Band:
    # Of a constant, rounding makes no difference.
    low, high = low - _ROUNDING * abs(low), high + _ROUNDING * abs(high)
    if not linear:
        low, high = exp(low), exp(high)
    return Band(first, last, low, high)


def _windows(run: Series, steps: int) -> dict[int, list[float]]:
    found: dict[int, list[float]] = {}
    for step in sorted(run):
        found.setdefault((step - 1) // steps, []).append(run[step])
    return {index: own for index, own in found.items() if len(own) == steps}


def _reach(medians: Sequence[Series], index: int) -> tuple[float, float]:
    """Return the extremes of medians at steps that another seed may have reached by then.

    Where a run ends before, or begins after them, it is taken to go on as it did.
    """
    begin, end = floor(index / _AHEAD), ceil((index + 1) * _AHEAD) - 1
    low, high = [], []
    for run in medians:
        known = [at for at in sorted(run) if begin <= at <= end]
        if not known:
            continue
        values = [run[at] for at in known]
        rate = (values[-1] - values[0]) / max(known[-1] - known[0], 1)
        beyond = [values[-1] + rate * (end - known[-1])] if known[-1] < end else []
        before = [values[0] - rate * (known[0] - begin)] if known[0] > begin else []
        low.append(min([*values, *beyond, *before]))
        high.append(max([*values, *beyond, *before]))
    return min(low), max(high)


def _scatter(windows: Sequence[Mapping[int, list[float]]], index: int) -> float:
    """Return the largest scatter of steps around a window in any run: of neighbours, no trend."""
    found = [0.0]
    for run in windows:
        near = [at for at in run if abs(at - index) <= _NEIGHBOURS]
        moves = [abs(b - a) for at in near for a, b in zip(run[at], run[at][1:], strict=False)]
        if moves:
            found.append(_MAD_TO_DEVIATION * median(moves) / sqrt(2))
    return max(found)


def _spread(medians: Sequence[Series], index: int) -> float:
    """Return how far another run may lie from good ones, by how far they lie from each other."""
    squares = []
    for at in range(index - _SPREAD_WINDOWS, index + _SPREAD_WINDOWS + 1):
        values = [run[at] for run in medians if at in run]
        if len(values) > 1:
            center = fmean(values)
            squares.append(sum((v - center) ** 2 for v in values) / (len(values) - 1))
    factor = _SPREADS.get(len(medians), _SPREADS_OF_MANY)
    return factor * sqrt(fmean(squares)) if squares else 0.0


def _bands_of_samples(runs: Sequence[Series]) -> tuple[Band, ...]:
    """Return a band for each step on which layers were sampled; it holds up to the next one."""
    logs = [{step: log(norm) for step, norm in run.items()} for run in runs]
    steps = sorted({step for run in logs for step in run})
    moves = [
        abs(run[b] - run[a])
        for run in logs
        for a, b in zip(sorted(run), sorted(run)[1:], strict=False)
    ]
    if len(moves) < _NEIGHBOURS:
        return ()
    scatter = _MAD_TO_DEVIATION * median(moves) / sqrt(2)
    margin = max(_LAYER_SCATTERS * scatter, _LAYER_FLOOR)
    bands = []
    for place, step in enumerate(steps):
        near = set(steps[max(place - 1, 0) : place + 2])
        near |= {other for other in steps if step / _AHEAD <= other <= step * _AHEAD}
        known = [run[at] for run in logs for at in near if at in run]
        last = steps[place + 1] - 1 if place + 1 < len(steps) else int(step * _AHEAD)
        bands.append(_band(step, last, min(known) - margin, max(known) + margin))
    return tuple(bands)


@dataclass(frozen=True, slots=True, kw_only=True)
class BaselineComparison:
    """A run against a baseline."""

    run: str
    source: str
    baseline: str
    good_runs: tuple[str, ...]
    first_step: int
    last_step: int
    departures: tuple[BaselineDeparture, ...]
    """Ascending by step: the first time of each."""
    compared: Mapping[str, int]
    """On how many steps, or samples of layers, there was a band to compare with."""

    @property
    def verdict(self) -> str:
        """The result in one sentence."""
        steps = f"steps {self.first_step} to {self.last_step}"
        if not self.departures:
            return f"{self.run} is like its baseline, {steps}."
        return f"{self.run} differs from its baseline since {departure_text(self.departures[0])}."

    def as_json(self) -> str:
        """Return the comparison as JSON."""
        return written(
            {
                "format": "mp_agent baseline comparison",
                "version": 1,
                **picked(self, "verdict", "run", "source", "baseline", "good_runs"),
                **picked(self, "first_step", "last_step", "departures", "compared"),
            }
        )


def departure_text(one: BaselineDeparture) -> str:
    """Return the step, what differs, and both values."""
    name = f"{one.layer}: {one.quantity}" if one.layer else one.quantity
    return f"step {one.step}: {name} {one.value} (good runs: {one.expected})"


def compare_with_baseline(run: str, path: Path) -> BaselineComparison:
    """Return where a recorded run leaves a baseline. Raises MpAgentError, naming run or file."""
    baseline = read_baseline(path)
    settings, _ = load_settings()
    evidence = evidence_at(Path(run), settings)
    ingest = StepIngest(
        Accumulator(
            evidence.values.limits,
            progress=Progress(),
            counters=CounterStore(metrics=dict.fromkeys(Scope, ())),
            window_seconds=settings.window_seconds,
            baseline=baseline,
        )
    )
    items = tuple(merged_items(evidence.ranks))
    for item in items:
        if isinstance(item, MergedTable):
            ingest.fold_layers(item)
        else:
            ingest.fold_step(item)
    steps = [item.step for item in items if isinstance(item, MergedStep)]
    return BaselineComparison(
        run=evidence.identity.run,
        source=run,
        baseline=str(path),
        good_runs=baseline.runs,
        first_step=min(steps, default=0),
        last_step=max(steps, default=0),
        departures=ingest.account.departures(evidence.facts) or (),
        compared={
            name: sum(baseline.band(name, WINDOWS_STEPS[0], step) is not None for step in steps)
            for name in baseline.bands
        },
    )


def print_comparison(found: BaselineComparison, console: AnyConsole, *, rows: int) -> None:
    """Print the verdict and what differs; rows: at most so many."""
    console.print(terminal.verdict(found.verdict, good=not found.departures))
    console.print(Text(f"good runs: {', '.join(found.good_runs)}, {found.baseline}"))
    for one in found.departures[:rows]:
        console.print(Text(f"• {departure_text(one)}"))
    if (more := len(found.departures) - rows) > 0:
        console.print(Text(f"and {more} more", style="dim"))
    lacking = [name for name, steps in found.compared.items() if not steps]
    if lacking:
        terminal.print_notes(
            console, [f"no good run has these steps: {', '.join(lacking)} not compared"]
        )


@click.group("baseline")
def baseline_command() -> None:
    """Keep what good runs looked like, to judge others against it."""


@baseline_command.command("save")
@click.argument("runs", nargs=-1, required=True)
@click.option(
    "--output",
    type=OutputPath(),
    required=True,
    help="The file to write, for the setting `baseline` and `mp-agent compare --baseline`.",
)
def save_command(runs: tuple[str, ...], output: Path) -> None:
    """Write the baseline of good runs to a file.

    RUNS are flight records, or directories of runs in shared memory; several records of one run
    count as one each. Two runs with different seeds make narrower and truer bands than one.
    """
    keep_inputs(runs, output)
    settings, _ = load_settings()
    try:
        good = [good_run(evidence_at(Path(run), settings)) for run in runs]
        baseline = baseline_of(good)
    except MpAgentError as error:
        refuse("baseline", error)
    content = msgspec.json.format(msgspec.json.encode(baseline), indent=1)
    write_whole(output, content.decode() + "\n")
    Console().print(Text(f"{output}: {_summary(baseline)}"))


def _summary(baseline: Baseline) -> str:
    bands: Iterable[Band] = (band for own in baseline.bands.values() for band in own[0])
    steps = sorted(step for band in bands for step in (band.first, band.last))
    parts = [counted(len(baseline.runs), "run"), counted(len(baseline.layers), "trained layer")]
    parts += [f"bands for steps {steps[0]} to {steps[-1]}" if steps else "no bands: too few steps"]
    return ", ".join(parts)
