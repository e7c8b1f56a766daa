"""Reads a run: from flight records, from shared memory, or from a node agent."""

import json
from math import isfinite
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote, urlsplit, urlunsplit

from mp_agent.compare.runs.series import QUANTITIES, RunSeries, RunStep, series_of_history
from mp_agent.doctor.fetch import fetch_from_agent
from mp_agent.errors import CompareError
from mp_agent.inputs.addresses import is_address, shown_address
from mp_agent.node.commands.flight import evidence_at
from mp_agent.node.flight.replay import replay
from mp_agent.settings import Settings


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
