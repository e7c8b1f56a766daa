"""The pages of planted faults: that they are what people would get today, and that they suffice."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mp_agent.alerting.alertmanager.configuration import CAUSES_FIRST
from mp_agent.alerting.conditions import CONDITIONS
from mp_agent.alerting.first_line import headline
from mp_agent.alerting.values import Severity
from tests.alerting.pages.delivery import deliver
from tests.alerting.pages.faults import NAMES, Fired
from tests.alerting.pages.golden import GOLDEN, pages
from tests.subtests import each

_BY_NAME = {condition.name: condition for condition in CONDITIONS}
_AGAIN = "if that is intended: python -m tests.alerting.pages"
_FIRST_LINE = re.compile(r".*\. Weights: .*\. Now: .*\.")


def _golden(name: str) -> dict[str, Any]:
    page: dict[str, Any] = json.loads((GOLDEN / f"{name}.json").read_text(encoding="utf-8"))
    return page


def _alerts(name: str) -> list[dict[str, Any]]:
    alerts: list[dict[str, Any]] = _golden(name)["at_once"]["webhook"]["alerts"]
    return alerts


def test_there_is_a_page_of_every_fault() -> None:
    assert sorted(path.stem for path in GOLDEN.glob("*.json")) == sorted(NAMES)
    assert len(NAMES) == 15


@each("name", NAMES)
def test_the_first_line_says_what_since_when_weights_and_what_to_do(name: str) -> None:
    page = _golden(name)["at_once"]["page"]
    title = page[0].removeprefix(f"[CRITICAL] run {name}: ")
    assert _FIRST_LINE.match(title)
    for alert in _alerts(name):
        line = alert["annotations"]["summary"]
        assert _FIRST_LINE.fullmatch(line)
        if step := alert["annotations"]["step"]:
            assert f", since step {step}." in line


@each("name", NAMES)
def test_causes_are_named_before_their_effects(name: str) -> None:
    lines = [line for line in _golden(name)["at_once"]["page"] if line.startswith("CRITICAL ")]
    named = [line.split()[1].rstrip(":") for line in lines]
    assert named and named == sorted(named, key=CAUSES_FIRST.index)
    assert len(named) == len(_alerts(name))


@each("name", NAMES)
def test_the_words_are_those_of_the_catalog(name: str) -> None:
    for alert in _alerts(name):
        condition = _BY_NAME[alert["labels"]["alertname"]]
        (level,) = (lv for lv in condition.levels if lv.severity is Severity.CRITICAL)
        assert level.triage is not None
        lines = {
            headline(
                condition.summary,
                level.triage,
                since_step=int(alert["annotations"]["step"] or 0),
                labels=alert["labels"],
                causes=condition.follows_from,
                active={**_steps(alert["annotations"].get("cause", "")), **nan_update},
            )
            for nan_update in ({}, _nan_update(name))
        }
        assert alert["annotations"]["summary"] in lines, _AGAIN


def _nan_update(name: str) -> dict[str, int]:
    """Return the step of the first update with NaN, where a fault has any."""
    own = [a for a in _alerts(name) if a["labels"]["alertname"] == "MpAgentNonFiniteUpdate"]
    return {alert["labels"]["alertname"]: int(alert["annotations"]["step"]) for alert in own}


def _steps(causes: str) -> dict[str, int]:
    return {name: int(step) for name, step in re.findall(r"(\w+) since step (\d+)", causes)}


@pytest.mark.e2e
@pytest.mark.long
def test_alertmanager_makes_the_same_pages_of_the_same_alerts(
    server: Callable[[str], Path], tmp_path: Path
) -> None:
    sent = {
        name: [
            Fired(alert["labels"], alert["annotations"], _seconds(alert["startsAt"]))
            for alert in _alerts(name)
        ]
        for name in NAMES
    }
    delivered = deliver(sent, server("alertmanager"), tmp_path)
    for name in NAMES:
        kept = _golden(name)["at_once"]
        assert delivered[name]["page"] == kept["page"], _AGAIN
        assert delivered[name]["webhook"] == kept["webhook"], _AGAIN


def _seconds(starts_at: str) -> float:
    hours, minutes, seconds = re.findall(r"T(\d\d):(\d\d):(\d\d)", starts_at)[0]
    return (int(hours) - 3) * 3600.0 + int(minutes) * 60.0 + int(seconds)


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.long
def test_a_fault_leads_to_its_page(server: Callable[[str], Path], tmp_path: Path) -> None:
    names = ("nan-update",)
    found = dict(pages(names, server("promtool"), server("alertmanager"), tmp_path))
    assert found["nan-update"] == _golden("nan-update"), _AGAIN
