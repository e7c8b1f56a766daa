"""All scenarios through the rules, and what comes of it per condition as a table."""

import os
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from statistics import median

from mp_agent.alerting.conditions import CONDITIONS
from tests.alerting.noise.faults import FAULTS
from tests.alerting.noise.healthy import HEALTHY
from tests.alerting.noise.judge import Verdict, judge
from tests.alerting.noise.replay import SCRAPE_SECONDS, Recording, record

SCENARIOS = (*HEALTHY, *FAULTS)
_BY_NAME = {scenario.name: scenario for scenario in SCENARIOS}

_HEADER = (
    "| alert | planted | found | false alarms | precision | recall | time to alert |",
    "| --- | --- | --- | --- | --- | --- | --- |",
)


def record_all(directory: Path) -> list[Recording]:
    """Return the scrapes of every scenario."""
    # The slowest first, so that no process waits for the other at the end.
    order = sorted(SCENARIOS, key=lambda s: -s.minutes * s.ranks)
    names = [scenario.name for scenario in order]
    with ProcessPoolExecutor(min(2, os.cpu_count() or 1), get_context("spawn")) as pool:
        return list(pool.map(_record, names, [directory] * len(names)))


def verdicts(promtool: Path) -> list[Verdict]:
    """Return what the shipped rules say of every scenario."""
    with tempfile.TemporaryDirectory() as directory:
        return judge(record_all(Path(directory)), promtool, Path(directory))


def _record(name: str, directory: Path) -> Recording:
    return record(_BY_NAME[name], directory)


def table(found: Sequence[Verdict]) -> str:
    """Return a Markdown table, a row per condition of the catalog."""
    rows = [_row(condition.name, found) for condition in CONDITIONS]
    return "\n".join([*_HEADER, *rows])


def summary(found: Sequence[Verdict]) -> str:
    """Return in a sentence how many runs were replayed."""
    healthy = [verdict for verdict in found if verdict.scenario.healthy]
    critical = sum("critical" in verdict.worst.values() for verdict in healthy)
    hours = sum(verdict.scenario.minutes for verdict in found) / 60
    return (
        f"{len(found)} simulated runs, {hours:.0f} hours in all, scraped and judged every "
        f"{SCRAPE_SECONDS} s: {len(healthy)} healthy ones, of which {critical} brought a critical "
        f"alert, and {len(found) - len(healthy)} with a planted fault."
    )


def _row(name: str, found: Sequence[Verdict]) -> str:
    planted = [verdict for verdict in found if name in verdict.scenario.expected]
    hits = [verdict for verdict in planted if name not in verdict.missed]
    false = [verdict for verdict in found if name in verdict.surprises]
    fired = len(hits) + len(false)
    cells = (
        f"`{name}`",
        str(len(planted)),
        str(len(hits)),
        str(len(false)),
        f"{len(hits) / fired:.2f}" if fired else "",
        f"{len(hits) / len(planted):.2f}" if planted else "",
        _times([verdict.seconds_to(name) for verdict in hits]),
    )
    return "| " + " | ".join(cells) + " |"


def _times(seconds: Sequence[float]) -> str:
    if not seconds:
        return ""
    low, high = min(seconds), max(seconds)
    if len(seconds) == 1:
        return _time(low)
    return f"{_time(median(seconds))} ({_time(low)} to {_time(high)})"


def _time(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
