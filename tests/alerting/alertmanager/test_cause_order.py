"""Causes stand before their effects, in the order in which a page names alerts."""

from mp_agent.alerting.alertmanager.configuration import CAUSES_FIRST
from mp_agent.alerting.conditions import CONDITIONS


def test_every_condition_is_named_once() -> None:
    assert sorted(CAUSES_FIRST) == sorted(condition.name for condition in CONDITIONS)


def test_causes_stand_before_their_effects() -> None:
    place = {name: index for index, name in enumerate(CAUSES_FIRST)}
    pairs = [(cause, c.name) for c in CONDITIONS for cause in c.follows_from]
    assert pairs
    assert [pair for pair in pairs if place[pair[0]] >= place[pair[1]]] == []
