"""Causes stand before their effects, in the order in which a page names alerts."""

from mp_agent.alerting.alertmanager.configuration import CAUSES_FIRST
from mp_agent.alerting.conditions import CONDITIONS
from mp_agent.alerting.first_line import FOLLOWS_FROM


def test_every_condition_is_named_once() -> None:
    assert sorted(CAUSES_FIRST) == sorted(condition.name for condition in CONDITIONS)


def test_causes_stand_before_their_effects() -> None:
    place = {name: index for index, name in enumerate(CAUSES_FIRST)}
    pairs = [(cause, name) for name, causes in FOLLOWS_FROM.items() for cause in causes]
    assert pairs
    assert [pair for pair in pairs if place[pair[0]] >= place[pair[1]]] == []
