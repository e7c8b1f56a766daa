"""Transfers are handed over when they are whole, however the device's writes become visible."""

import numpy as np
import pytest
import torch

from mp_agent.probe.delivery.transfers import DeviceTransfers, TransferSlots
from mp_agent.records.steps import FloatArray
from mp_agent.ring.format.slots import whole_values
from tests.agent.probe.seen_steps import CPU
from tests.agent.probe.simulated_device import SimulatedDevice
from tests.agent.probe.small_model import fail


def numbers(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_gives_places_back(clock):
    got: list[FloatArray] = []
    slots, transfers = TransferSlots.pinned(1, 2, CPU), DeviceTransfers(CPU)
    for number in range(3):
        assert transfers.send(slots, numbers(number, number), got.append)
        assert not transfers.send(slots, numbers(0, 0), got.append)
        clock.now += 1
        transfers.collect()
    assert [values.tolist() for values in got] == [[0, 0], [1, 1], [2, 2]]


def test_hands_over_copies_that_later_transfers_do_not_change(clock):
    got: list[FloatArray] = []
    slots, transfers = TransferSlots.pinned(1, 1, CPU), DeviceTransfers(CPU)
    clock.now = 1000
    for number in (1.0, 2.0):
        transfers.send(slots, numbers(number), got.append)
        transfers.collect()
    assert [values.tolist() for values in got] == [[1.0], [2.0]]


def test_the_scripts_default_device_is_of_no_account():
    torch.set_default_device("meta")
    try:
        slot, words = TransferSlots.pinned(1, 1, CPU).slot_of(1)
    finally:
        torch.set_default_device(None)
    assert slot.device == CPU
    assert words.tolist() == [0, 0, 0]


def test_a_letter_that_is_only_partly_there_is_not_handed_over(device: SimulatedDevice):
    got: list[FloatArray] = []
    slots, transfers = TransferSlots.pinned(4, 3, CPU), DeviceTransfers(CPU)
    transfers.send(slots, numbers(1, 2, 3), got.append)
    device.torn = True
    device.run()
    transfers.collect()
    assert got == []
    device.run()
    transfers.collect()
    assert [values.tolist() for values in got] == [[1, 2, 3]]


def test_transfers_that_arrived_are_handed_over_though_the_device_has_failed(
    device: SimulatedDevice,
):
    got: list[FloatArray] = []
    slots, transfers = TransferSlots.pinned(8, 1, CPU), DeviceTransfers(CPU)
    for number in range(3):
        transfers.send(slots, numbers(number), got.append)
    device.run(2)
    device.fail()
    transfers.drain(0.01)
    assert [values.tolist() for values in got] == [[0], [1]]


def test_one_that_cannot_be_received_keeps_no_other_back(device: SimulatedDevice):
    got: list[FloatArray] = []
    slots, transfers = TransferSlots.pinned(8, 1, CPU), DeviceTransfers(CPU)
    for number in range(3):
        transfers.send(slots, numbers(number), fail if number == 0 else got.append)
    device.run()
    with pytest.raises(ZeroDivisionError):
        transfers.drain(0.0)
    assert [values.tolist() for values in got] == [[1], [2]]
    assert len(transfers) == 0


def test_what_is_given_up_is_reported_once(device: SimulatedDevice):
    lost: list[int] = []
    slots, transfers = TransferSlots.pinned(8, 1, CPU), DeviceTransfers(CPU)
    for number in range(3):
        transfers.send(slots, numbers(number), lambda values: None, lambda: lost.append(1))
    device.run(1)
    transfers.collect()
    transfers.abandon()
    transfers.abandon()
    assert len(lost) == 2
    assert len(transfers) == 0


class TestChecksum:
    @pytest.fixture
    def transfer(self) -> np.ndarray:
        values = numbers(3.0, 4.0, float("nan"), -0.0, 5e-324, float("inf"))
        return DeviceTransfers(CPU).sealed(values, 7).numpy()

    def test_every_bit_of_the_numbers_comes_through(self, transfer):
        expected = numbers(3.0, 4.0, float("nan"), -0.0, 5e-324, float("inf"))
        values = whole_values(transfer, 7)
        assert values is not None
        assert values.tobytes() == expected.numpy().tobytes()

    def test_no_other_number_opens_it(self, transfer):
        assert whole_values(transfer, 6) is None

    @pytest.mark.parametrize("word", range(8))
    def test_it_is_not_whole_while_any_word_is_an_earlier_one(self, transfer, word):
        transfer[word] = 0 if transfer[word] else 1
        assert whole_values(transfer, 7) is None

    def test_what_is_missing_here_and_too_much_there_does_not_cancel_out(self, transfer):
        """3 and 4 change slots: the same bits in all, as counts do that go from layer to layer."""
        transfer[[1, 2]] = transfer[[2, 1]]
        assert whole_values(transfer, 7) is None
