"""Which call returns a step as complete, once, and in order."""

from types import SimpleNamespace

import pytest

from mp_agent.probe.optimizers.roles import Role
from mp_agent.probe.step.boundaries import StepBoundaries


def optimizer(label, role):
    return SimpleNamespace(
        label=label, role=role, scalars={}, of_run=role in (Role.FIRST, Role.JOINT)
    )


@pytest.fixture
def boundaries():
    return StepBoundaries()


def sequences(steps):
    return [step.sequence for step in steps]


def test_of_a_single_optimizer_the_step_is_complete_when_it_ends(boundaries):
    for sequence in (1, 2, 3):
        boundaries.begin_pass()
        assert sequences(boundaries.run_ended("", ())) == [sequence]
    assert boundaries.close_ended() == []


def test_an_optimizer_of_another_model_that_steps_in_turn_completes_the_step(boundaries):
    other = optimizer("1", Role.SEPARATE)
    boundaries.begin_pass()
    assert sequences(boundaries.run_ended("", ())) == [1]
    assert boundaries.other_ended(other) == []
    for sequence in (2, 3):
        boundaries.begin_pass()
        assert boundaries.run_ended("", ()) == []  # it waits for its companion
        assert sequences(boundaries.other_ended(other)) == [sequence]


def test_an_awaited_optimizer_of_the_model_completes_the_step(boundaries):
    boundaries.begin_pass()
    assert boundaries.run_ended("", {"1"}) == []
    assert sequences(boundaries.joint_ended("1")) == [1]
    assert boundaries.joint_ended("1") == []


def test_a_step_that_waits_is_complete_at_the_next_end_before_that_one(boundaries):
    boundaries.begin_pass()
    assert boundaries.run_ended("", {"1"}) == []
    boundaries.begin_pass()
    assert sequences(boundaries.run_ended("", {"1"})) == [1]
    assert sequences(boundaries.close_ended()) == [2]
    assert boundaries.close_ended() == []
