"""`mp-agent compare A B`: reads two runs, from records or a Prometheus, and compares them."""

import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from statistics import median
from typing import Any
from urllib.parse import parse_qs, quote, urlsplit, urlunsplit

from mp_agent.alerting.promql import quoted
from mp_agent.backtest.log.training_log import ReadOptions
from mp_agent.backtest.readers.prometheus import period_of, runs_in, samples
from mp_agent.catalog.metrics import BY_PROMETHEUS_NAME
from mp_agent.doctor.machine import fetch_from_agent
from mp_agent.errors import CompareError, SourceError
from mp_agent.inputs.addresses import is_address, shown_address
from mp_agent.node.commands.flight import evidence_at
from mp_agent.node.flight.replay import replay
from mp_agent.records.schema import TRAINED_RATIO
from mp_agent.report.options import show
from mp_agent.runs.divergence import (
    QUANTITIES,
    RunComparison,
    RunSeries,
    RunStep,
    compare_series,
    series_of_history,
)
from mp_agent.runs.report import print_runs, runs_as_html, runs_as_json
from mp_agent.settings import Settings, load_settings


def read_run(place: str, settings: Settings) -> RunSeries:
    """Return the run at a path or an address.

    A node agent knows no layers, and the last 1000 steps. Raises CompareError and FlightError,
    naming the place, when there is none, or when there are several.
    """
    if is_address(place):
        return _from_agent(place, settings)
    evidence = evidence_at(Path(place), settings)
    history = replay(evidence.ranks)
    return series_of_history(evidence.identity.run, place, history, evidence.facts)


def _from_agent(address: str, settings: Settings) -> RunSeries:
    shown = shown_address(address.partition("?")[0])
    try:
        parts = urlsplit(address)
    except ValueError:
        raise CompareError(f"{shown}: the address has no valid host and port") from None
    base = urlunsplit((parts.scheme, parts.netloc, parts.path.rstrip("/"), "", ""))
    found = _document(f"{base}/api/v1/snapshot", settings).get("runs")
    listed = [one for one in found if isinstance(one, dict)] if isinstance(found, list) else []
    runs = {str(one.get("run", "")): one for one in listed if one.get("is_root")}
    name = parse_qs(parts.query).get("run", [""])[0]
    if not name and len(runs) == 1:
        name = next(iter(runs))
    if name not in runs:
        known = ", ".join(sorted(runs)) or "none"
        what = f"no run {name!r}" if name else "several runs or none; name one with /?run="
        raise CompareError(f"{shown}: {what} (known: {known})")
    history = _document(f"{base}/api/v1/history", settings, f"run={quote(name, safe='')}")
    summary = runs[name].get("summary")
    facts = summary.get("facts") if isinstance(summary, dict) else None
    known_facts = (
        {str(key): str(value) for key, value in facts.items()} if isinstance(facts, dict) else {}
    )
    source = f"{shown}?run={name}" if parts.query else shown
    return series_of_columns(name, source, history, known_facts)


def series_of_columns(
    name: str, source: str, history: dict[str, Any], facts: dict[str, str]
) -> RunSeries:
    """Return the series of a run from a node agent's columns. Raises CompareError for others."""
    try:
        numbers = [int(step) for step in history["step"]]
        columns = {key: history[key] for key in QUANTITIES if key in history}
        skipped = history["skipped"]
        steps = {}
        for index, number in enumerate(numbers):
            values = {
                key: float(column[index])
                for key, column in columns.items()
                if column[index] is not None and isfinite(column[index])
            }
            marks = frozenset({"skipped"} if skipped[index] else ())
            steps[number] = RunStep(values, marks)
    except (KeyError, IndexError, TypeError, ValueError, OverflowError) as error:
        raise CompareError(f"{source}: its history cannot be read: {error!r}") from error
    return RunSeries(name=name, source=source, steps=steps, facts=facts)


def _document(url: str, settings: Settings, query: str = "") -> dict[str, Any]:
    shown = shown_address(url)
    found = fetch_from_agent(url, settings, query)
    if not found.ok:
        raise CompareError(f"{shown}: {found.problem or f'answered {found.status}'}")
    try:
        document = json.loads(found.body)
    except (ValueError, RecursionError) as error:
        raise CompareError(f"{shown}: answered no JSON: {error}") from error
    if not isinstance(document, dict):
        raise CompareError(f"{shown}: answered no JSON object")
    return document


_STEP = "mp_agent_step"
_SAMPLED_STEP = "mp_agent_sampled_step"
_LAYER_NORM = "mp_agent_layer_grad_norm"
_INFO = "mp_agent_run_info"
_TRAINED = "mp_agent_parameters_trained_ratio"
_FACTS = ("strategy", "precision", "scaler", "world_size")
_GAUGES = {
    "loss": "mp_agent_loss",
    "grad_norm": "mp_agent_grad_norm",
    "grad_abs_max": "mp_agent_grad_abs_max",
    "learning_rate": "mp_agent_learning_rate",
}
_COUNTERS = {
    "loss_nonfinite": "mp_agent_loss_nonfinite_steps_total",
    "gradients_nonfinite": "mp_agent_grad_nonfinite_steps_total",
    "skipped": "mp_agent_skipped_steps_total",
}
_NAMES = (
    _STEP,
    _SAMPLED_STEP,
    _LAYER_NORM,
    _INFO,
    _TRAINED,
    *_GAUGES.values(),
    *_COUNTERS.values(),
)
assert set(_NAMES) <= set(BY_PROMETHEUS_NAME)

_COARSE_POINTS = 1000


@dataclass(slots=True)
class _Scrape:
    """What the run's series said at one time; of several targets or replicas the largest."""

    values: dict[str, float] = field(default_factory=dict)
    layers: dict[str, float] = field(default_factory=dict)
    facts: dict[str, str] = field(default_factory=dict)

    def add(self, name: str, labels: Mapping[str, str], value: float) -> None:
        """Add a sample; those of further optimizers and families are left out."""
        if labels.get("optimizer") or labels.get("family", "gradients") != "gradients":
            return
        if name == _INFO:
            self.facts |= {fact: labels[fact] for fact in _FACTS if labels.get(fact)}
        elif name == _TRAINED:
            self.facts[TRAINED_RATIO] = f"{value:.4g}"
        elif name == _LAYER_NORM:
            layer = labels.get("layer", "")
            self.layers[layer] = max(value, self.layers.get(layer, value))
        else:
            self.values[name] = max(value, self.values.get(name, value))


def read_scraped_run(address: str, run: str, options: ReadOptions, now_seconds: float) -> RunSeries:
    """Return a run as a Prometheus recorded it.

    Only steps that a scrape saw are there: the loss and the norms are those of that step, and a
    mark stands at the first scrape after its counter rose. Raises CompareError, naming the run,
    where the Prometheus cannot be asked or has no such run.
    """
    source = shown_address(address)
    try:
        start, end = period_of(options, now_seconds)
        known = runs_in(address, start, end)
        if run not in known:
            names = ", ".join(known[:20]) or "none"
            raise CompareError(f"{source}: no run {run!r} in that time (known: {names})")
        scrapes = _scrapes(address, run, start, end, options.scrape_seconds)
    except SourceError as error:
        raise CompareError(f"{source}: {error}") from None
    steps, distance = _steps(scrapes)
    facts: dict[str, str] = {}
    for scrape in scrapes:
        facts |= scrape.facts
    return RunSeries(
        name=run,
        source=source,
        steps=steps,
        layers=_layers(scrapes),
        facts=facts,
        scraped_steps=distance,
    )


def _scrapes(address: str, run: str, start: float, end: float, interval: float) -> list[_Scrape]:
    """Return the scrapes in the order of time."""
    selector = f"{{__name__=~{quoted('|'.join(_NAMES))},run={quoted(run)}}}"
    begun, ended = _lifetime(address, run, start, end)
    found: dict[float, _Scrape] = {}
    for at, (name, labels), value in samples(address, selector, begun, ended, interval):
        found.setdefault(at, _Scrape()).add(name, dict(labels), value)
    return [found[at] for at in sorted(found)]


def _lifetime(address: str, run: str, start: float, end: float) -> tuple[float, float]:
    """Return the part of a period in which the run has samples, a little more on both sides."""
    coarse = max((end - start) / _COARSE_POINTS, 1.0)
    query = f"max(max_over_time({_STEP}{{run={quoted(run)}}}[{round(1000 * coarse)}ms]))"
    times = [at for at, _, _ in samples(address, query, start, end + coarse, coarse)]
    if not times:
        return start, end
    return max(start, min(times) - coarse), min(end, max(times) + coarse)


def _steps(scrapes: list[_Scrape]) -> tuple[dict[int, RunStep], float]:
    """Return the steps that were seen, and how many lie between two scrapes that saw progress."""
    steps: dict[int, RunStep] = {}
    distances: list[int] = []
    counts: dict[str, float] = {}
    before: int | None = None
    for scrape in scrapes:
        marks = frozenset(_risen(scrape, counts))
        if _STEP not in scrape.values:
            continue
        step = int(scrape.values[_STEP])
        if before is not None and step > before:
            distances.append(step - before)
        values = {
            quantity: scrape.values[name]
            for quantity, name in _GAUGES.items()
            if isfinite(scrape.values.get(name, float("nan")))
        }
        earlier = steps[step].marks if step == before else frozenset()
        steps[step] = RunStep(values, marks | earlier)
        before = step
    return steps, float(median(distances)) if distances else 1.0


def _risen(scrape: _Scrape, counts: dict[str, float]) -> Iterator[str]:
    """Yield the marks whose counter rose since the scrape before; a lower one began again."""
    for mark, name in _COUNTERS.items():
        value = scrape.values.get(name)
        if value is None:
            continue
        before = counts.get(mark)
        counts[mark] = value
        if before is not None and (value > before or 0 < value < before):
            yield mark


def _layers(scrapes: list[_Scrape]) -> dict[int, dict[str, float]]:
    return {
        int(scrape.values[_SAMPLED_STEP]): scrape.layers
        for scrape in scrapes
        if scrape.layers and _SAMPLED_STEP in scrape.values
    }


def compare_runs(first: str, second: str, **shown: Any) -> None:
    """Compare two runs and show the result. Raises MpAgentError, naming the run."""
    settings, _ = load_settings()
    _show(compare_series(read_run(first, settings), read_run(second, settings)), **shown)


def compare_scraped_runs(
    address: str, names: tuple[str, str], options: ReadOptions, **shown: Any
) -> None:
    """Compare two runs that a Prometheus scraped. Raises CompareError, naming the run."""
    if not is_address(address):
        raise CompareError(
            f"--prometheus has value {shown_address(address)!r}; give http://host:port"
        )
    now_seconds = time.time()
    first, second = (read_scraped_run(address, name, options, now_seconds) for name in names)
    _show(compare_series(first, second), **shown)


def _show(comparison: RunComparison, *, rows: int, as_document: bool, page: Path | None) -> None:
    show(
        json=lambda: runs_as_json(comparison),
        html=lambda: runs_as_html(comparison),
        text=lambda console: print_runs(comparison, console, rows=rows),
        as_document=as_document,
        page=page,
    )
