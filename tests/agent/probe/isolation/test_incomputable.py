"""What torch cannot compute is None; what is meant for the script, or broken, is raised."""

import signal
from typing import NoReturn

import pytest
import torch
from torch import nn

from mp_agent.probe.isolation import computed, has_memory
from tests.subtests import each


def doubled(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.double()


def test_plain_results_are_returned_and_others_are_none():
    found = computed(doubled, torch.ones(2))
    assert found is not None and found.tolist() == [1.0, 1.0]
    assert computed(doubled, torch.ones(2, dtype=torch.uint8).view(torch.bits8)) is None
    assert computed(nn.Parameter, torch.ones(2)) is None


@pytest.mark.parametrize("error", [KeyError, AssertionError, torch.OutOfMemoryError])
def test_failures_of_ours_and_memory_that_ran_out_are_raised(error):
    def fail(tensor: torch.Tensor) -> NoReturn:
        raise error("broken")

    with pytest.raises(error):
        computed(fail, torch.ones(2))


def test_a_signal_handler_that_raises_is_heard():
    def raise_timeout(number: int, frame: object) -> NoReturn:
        raise RuntimeError("time is up")

    def interrupted(tensor: torch.Tensor) -> torch.Tensor:
        signal.raise_signal(signal.SIGUSR1)
        return tensor

    before = signal.signal(signal.SIGUSR1, raise_timeout)
    try:
        with pytest.raises(RuntimeError, match="time is up"):
            computed(interrupted, torch.ones(2))
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_an_interruption_that_the_script_is_handling_is_not_raised_again():
    try:
        raise KeyboardInterrupt
    except KeyboardInterrupt:
        assert computed(doubled, torch.ones(2, dtype=torch.uint8).view(torch.bits8)) is None


@each(
    ("tensor", "kept_bytes", "expected"),
    [
        (torch.ones(4, 4), 64, True),
        (torch.ones(4, 4), 63, False),
        (torch.ones(4, 4)[:2], 32, True),
        (torch.ones(4, 4)[2:], 32, False),
        (torch.ones(4, 4).T, 64, True),
        (torch.ones(1).expand(9, 9), 4, True),
        (torch.ones(()), 0, False),
        (torch.ones(0, 4), 0, True),
    ],
)
def test_a_tensor_has_memory_if_its_last_element_has(tensor, kept_bytes, expected):
    tensor.untyped_storage().resize_(kept_bytes)
    assert has_memory(tensor) is expected
