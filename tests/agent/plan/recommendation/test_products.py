"""Counted products, against torch's own counter of operations."""

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence
from torch.utils.flop_counter import FlopCounterMode

from mp_agent.plan.execution.training import workload_of
from mp_agent.plan.recommendation.choose import odd_modules
from mp_agent.plan.recommendation.products import measure_products
from tests.agent.plan.recommendation.models import odd_network
from tests.subtests import each


def total_of(model, inputs):
    def loss(model, batch):
        return model(batch[0]).float().square().mean()

    return measure_products(workload_of(model, (inputs,), loss, 1))


@each(
    ("model", "shape"),
    [
        (nn.Linear(24, 40), (3, 7, 24)),
        (nn.Linear(24, 40, bias=False), (24,)),
        (nn.Conv2d(6, 8, 3, stride=2, padding=1, groups=2), (2, 6, 17, 9)),
        (nn.Conv1d(4, 10, 5), (2, 4, 32)),
        (nn.ConvTranspose2d(6, 8, 3, stride=2), (2, 6, 5, 7)),
        (nn.TransformerEncoderLayer(16, 2, 24, batch_first=True), (2, 5, 16)),
    ],
)
def test_operations_are_those_of_torchs_counter(model, shape):
    torch.manual_seed(1)
    inputs = torch.randn(shape)
    with FlopCounterMode(display=False) as counter:
        model(inputs)
    assert sum(one.flops for one in total_of(model, inputs)) == counter.get_total_flops() > 0


@each("kind", [nn.LSTM, nn.GRU, nn.RNN])
@each("bidirectional", [False, True])
def test_operations_of_an_rnn_are_those_of_its_cells(kind, bidirectional):
    model = kind(12, 20, num_layers=2, bidirectional=bidirectional)
    gates = {nn.LSTM: 4, nn.GRU: 3, nn.RNN: 1}[kind]
    directions = 2 if bidirectional else 1
    weights = sum(one.numel() for name, one in model.named_parameters() if "weight" in name)
    assert weights == directions * gates * 20 * (12 + 20 + 20 * directions + 20)

    def loss(model, batch):
        return model(batch)[0].square().mean()

    found = measure_products(workload_of(model, torch.randn(6, 3, 12), loss, 1))
    assert sum(one.flops for one in found) == 2 * 6 * 3 * weights
    assert odd_modules(found)[0].dimensions[:1] == (6 * 3,)


def test_a_packed_sequence_counts_its_own_elements():
    model = nn.LSTM(8, 16)
    packed = pack_sequence([torch.randn(5, 8), torch.randn(2, 8)])

    def loss(model, batch):
        return model(packed)[0].data.square().mean()

    found = measure_products(workload_of(model, torch.zeros(1), loss, 1))
    assert sum(one.flops for one in found) == 2 * 7 * 4 * 16 * (8 + 16)


def test_each_product_counts_for_the_module_that_runs_it():
    model, batch, loss = odd_network()
    found = measure_products(workload_of(model, batch, loss, 1))
    assert [one.module for one in found] == ["0", "3", "4"]
    odd = odd_modules(found)
    assert [(one.module, one.dimensions) for one in odd] == [("3", (50,)), ("4", (50,))]
    total = 16 * 64 + 64 * 50 + 50 * 8
    assert [one.flops_ratio for one in odd] == pytest.approx([64 * 50 / total, 50 * 8 / total])


def test_what_the_loss_multiplies_is_called_the_loss():
    model, batch, _ = odd_network()

    def loss(model, batch):
        outputs = model(batch[0])
        return (outputs @ outputs.T).mean()

    found = measure_products(workload_of(model, batch, loss, 1))
    assert found[-1].module == "(loss)" and found[-1].dimensions == (32, 32, 8)
