"""Parameters that no optimizer holds, and the names of those that a look on a device has found."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mp_agent.probe import accelerator
from mp_agent.probe.recording.parameter_census import NamesOnTheWay, ParameterCensus
from mp_agent.probe.recording.run_facts import ObservedTraits

FLAGS = torch.tensor([True, False, True])


@pytest.fixture(params=[True, False], ids=["host", "device"])
def traits(request, monkeypatch) -> ObservedTraits:
    monkeypatch.setattr(accelerator, "is_on_host", lambda place: request.param)
    monkeypatch.setattr(accelerator, "cuda_is_used", lambda: True)
    return ObservedTraits()


def test_are_those_whose_flag_is_set_wherever_it_is(traits):
    NamesOnTheWay(traits, "unheld_parameters").send(["a", "b", "c"], FLAGS)
    assert traits.parameters == {"unheld_parameters": "a, c"}


def test_leave_other_facts_as_they_are_and_none_of_their_own_without_a_flag(traits):
    traits.parameters = {"unchanged_parameters": "x", "unheld_parameters": "a"}
    NamesOnTheWay(traits, "unheld_parameters").send(["a"], FLAGS[1:2])
    assert traits.parameters == {"unchanged_parameters": "x"}


def test_are_not_known_before_the_flags_have_arrived(traits, monkeypatch):
    monkeypatch.setattr(accelerator.HostCopy, "has_arrived", False)
    names = NamesOnTheWay(traits, "unheld_parameters")
    names.send(["a"], FLAGS[:1])
    assert traits.parameters == {}
    monkeypatch.setattr(accelerator.HostCopy, "has_arrived", True)
    names.note()
    assert traits.parameters == {"unheld_parameters": "a"}


@pytest.mark.parametrize(("gradient", "unheld"), [(1.0, 1.0), (0.0, 0.0)])
def test_a_gradient_in_a_buffer_of_an_engine_counts_unless_it_is_zero(gradient, unheld):
    parameter: Any = torch.nn.Parameter(torch.ones(4))
    parameter.main_grad = torch.zeros(4)
    registry: Any = SimpleNamespace(
        root=None, unheld_gradients=lambda *, strays: [("head.bias", parameter)]
    )
    traits = ObservedTraits()
    census = ParameterCensus(registry, traits)
    found: dict[str, Any] = {}
    census.look(1, found, soon=False)
    assert found == {"unheld_parameters": 0.0}, "one look shows nothing"
    parameter.main_grad.add_(gradient)
    census.look(10, found, soon=False)
    assert found == {"unheld_parameters": unheld}
    assert traits.parameters == ({"unheld_parameters": "head.bias"} if unheld else {})
