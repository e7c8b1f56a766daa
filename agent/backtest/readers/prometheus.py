"""A Prometheus that scraped the runs: their series over a time range, at every scrape."""

import re
from collections.abc import Iterator, Mapping, Sequence
from math import isfinite

from mp_agent.alerting.backtesting import Quantity
from mp_agent.alerting.conditions import CONDITIONS
from mp_agent.alerting.detector.detector import Detector
from mp_agent.alerting.detector.readings import Reading
from mp_agent.alerting.promql import quoted
from mp_agent.alerting.values import values_in_force
from mp_agent.backtest.log.training_log import Point, ReadOptions, Scrape, TrainingLog
from mp_agent.catalog.metrics import METRICS
from mp_agent.errors import AnswerTooLarge, LogError, SourceError
from mp_agent.inputs.addresses import shown_address
from mp_agent.inputs.http import Matrix, ask

_NAME = "prometheus"
_POINTS_PER_QUERY = 10_000
"""Prometheus refuses more than 11 000 per series."""
_RUNS_MAX = 1000
_SAMPLES_MAX = 20_000_000
"""Each takes some 100 bytes of memory."""
_STEP_MAX = 2.0**53
_RANGE_SECONDS = 24 * 3600.0
_CURVES = ("mp_agent_loss", "mp_agent_grad_norm", "mp_agent_learning_rate", "mp_agent_loss_scale")
_STEP = "mp_agent_step"
_TARGET = "instance"

Series = tuple[str, tuple[tuple[str, str], ...]]
"""A series' name and label pairs."""


def read_prometheus(source: str, options: ReadOptions, now_seconds: float) -> Sequence[TrainingLog]:
    """Return every run that a Prometheus has series of within the time range of the options.

    Raises SourceError where it cannot be asked, and where there is no run.
    """
    start, end = period_of(options, now_seconds)
    pattern = "mp_agent_.+" if options.every_series else "|".join(sorted(_names() - {"up"}))
    runs = runs_in(source, start, end)
    wanted = [run for run in runs if not options.run or run == options.run]
    if not wanted:
        known = ", ".join(runs[:20]) or "none"
        raise LogError(f"has no series of run {options.run or 'any'} in that time; runs: {known}")
    if len(wanted) > _RUNS_MAX:
        raise LogError(f"has {len(wanted)} runs in that time; name one by --run")
    logs = (_log(source, run, pattern, start, end, options.scrape_seconds) for run in wanted)
    found = [log for log in logs if log is not None]
    if not found:
        raise LogError(f"has no sample of {', '.join(wanted[:20])} in that time")
    return found


def period_of(options: ReadOptions, now_seconds: float) -> tuple[float, float]:
    """Return start and end of the time range in Unix seconds. Raises LogError where it is none."""
    end = options.end_unix_seconds or now_seconds
    start = options.start_unix_seconds or end - _RANGE_SECONDS
    if not start < end:
        raise LogError(f"the range begins at {start:.0f}, which is not before its end at {end:.0f}")
    return start, end


def runs_in(source: str, start: float, end: float) -> list[str]:
    """Return the runs of which a Prometheus has steps in a time range. Raises SourceError."""
    range_of_time = {"match[]": _STEP, "start": start, "end": end}
    return ask(source, "label/run/values", range_of_time, list[str])


def _names() -> frozenset[str]:
    """Return the series that a condition looks at, and those that are drawn."""
    needed = Detector(CONDITIONS, values_in_force()).readings.names
    return needed | {_STEP, *_CURVES}


def _log(
    source: str, run: str, pattern: str, start: float, end: float, interval: float
) -> TrainingLog | None:
    """Return a run's series whose names match `pattern`; None where there are none."""
    table: dict[float, dict[Series, float]] = {}
    for query in (f'{{__name__=~"{pattern}",run={quoted(run)}}}', "up"):
        if query == "up":
            query = _up_of(table)
        for at, series, value in samples(source, query, start, end, interval) if query else ():
            table.setdefault(at, {})[series] = value
    if not table:
        return None
    times = _without_idle_ends(sorted(table), interval)
    scrapes = tuple(Scrape(at, _readings(table[at])) for at in times)
    counted = sorted({name for metric in METRICS for name in metric.thresholds})
    return TrainingLog(
        name=run,
        source=shown_address(source),
        format=_NAME,
        points=tuple(_points(times, table)),
        scrapes=scrapes,
        quantities=frozenset(Quantity),
        notes=(
            f"one judgement per {interval:g} s; what node agents counted against their own "
            f"thresholds stays as they counted it: {', '.join(counted)}",
        ),
    )


def _up_of(table: Mapping[float, Mapping[Series, float]]) -> str:
    """Return the query for whether the targets of a run could be scraped."""
    instances = {dict(labels).get(_TARGET, "") for row in table.values() for _, labels in row} - {
        ""
    }
    if not instances:
        return ""
    return f"up{{{_TARGET}=~{quoted('|'.join(re.escape(one) for one in sorted(instances)))}}}"


def samples(
    source: str, query: str, start: float, end: float, interval: float
) -> Iterator[tuple[float, Series, float]]:
    """Yield (Unix seconds, series, value) on a grid of `interval`, finite values only.

    Series are named without the labels that say whose and where they are. A range is asked for in
    smaller parts where the answer is too large. Raises SourceError.
    """
    begin, points, count = start, _POINTS_PER_QUERY, 0
    while begin <= end:
        until = min(begin + (points - 1) * interval, end)
        times = {"start": begin, "end": until, "step": interval}
        try:
            data = ask(source, "query_range", {"query": query, **times}, Matrix)
        except AnswerTooLarge:
            if points == 1:
                raise
            points = points // 2
            continue
        for series in data.result:
            key = _series(series.metric)
            for at, text in series.values:
                if not begin - interval < at < until + interval:
                    raise SourceError(f"the answer has a sample at {at}, outside of the range")
                value = _number(text)
                if isfinite(value):
                    count += 1
                    yield at, key, value
        if count > _SAMPLES_MAX:
            raise LogError(f"has more than {_SAMPLES_MAX} samples of one run: name a shorter range")
        begin = until + interval


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise SourceError(f"the answer has a sample with value {text[:60]!r}") from None


def _series(metric: Mapping[str, str]) -> Series:
    kept = {
        name: text
        for name, text in metric.items()
        if name not in ("__name__", "run", "job", "cluster", "namespace", "pod", "container")
    }
    return metric.get("__name__", ""), tuple(sorted(kept.items()))


def _readings(row: Mapping[Series, float]) -> tuple[Reading, ...]:
    return tuple(row.items())


def _without_idle_ends(times: Sequence[float], interval: float) -> Sequence[float]:
    """Return every time of the grid from the first sample to the last: gaps are judged too."""
    whole, at = [], times[0]
    known = set(times)
    while at <= times[-1]:
        whole.append(at)
        at += interval
    return whole if known <= set(whole) else times


def _points(
    times: Sequence[float], table: Mapping[float, Mapping[Series, float]]
) -> Iterator[Point]:
    step = 0
    for at in times:
        found: dict[str, float] = {}
        for (name, labels), value in table.get(at, {}).items():
            if all(label == _TARGET for label, _ in labels):
                found[name] = max(value, found.get(name, value))
        step = max(step, int(min(found.get(_STEP, step), _STEP_MAX)))
        yield Point(
            step=step,
            time_seconds=at,
            loss=found.get("mp_agent_loss"),
            grad_norm=found.get("mp_agent_grad_norm"),
            learning_rate=found.get("mp_agent_learning_rate"),
            loss_scale=found.get("mp_agent_loss_scale"),
        )
