import torch

from mp_agent.probe.delivery.pinned_copies import PinnedCopies, PinnedPool
from mp_agent.records.steps import FloatArray
from tests.agent.probe.seen_steps import CPU


def test_gives_pieces_back(clock):
    pool, mailbox = PinnedPool(1, 2, CPU), PinnedCopies(CPU, clock.mark)
    got: list[FloatArray] = []
    for number in range(3):
        assert mailbox.send(pool, torch.full((2,), float(number)), got.append)
        assert not mailbox.send(pool, torch.zeros(2), got.append)
        clock.now += 1
        mailbox.collect()
    assert [values.tolist() for values in got] == [[0, 0], [1, 1], [2, 2]]


def test_hands_over_copies_that_later_letters_do_not_change(clock):
    pool, mailbox = PinnedPool(1, 1, CPU), PinnedCopies(CPU, clock.mark)
    got: list[FloatArray] = []
    clock.now = 1000
    for number in (1.0, 2.0):
        mailbox.send(pool, torch.tensor([number]), got.append)
        mailbox.collect()
    assert [values.tolist() for values in got] == [[1.0], [2.0]]
