"""Reported log-probabilities reach the record of their step; training never notices."""

import gc
import weakref
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from mp_agent.catalog.metrics.reinforcement import k1, k3
from mp_agent.probe.instruments.logprobs import INCOMPUTABLE, MASK, NO_TENSORS, PLACES, SHAPES
from mp_agent.records.columns import GRADIENTS, LOGPROBS, by_name
from mp_agent.records.steps import StepRecord
from tests.agent.probe.instruments.logprobs_reference import expected_of
from tests.agent.probe.rings import RingContents, read_ring


def logprobs(*shape: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    trainer = -torch.rand(shape, generator=generator)
    return trainer, trainer + 0.1 * torch.randn(shape, generator=generator)


class Training:
    """Steps of a small model, with something reported in between."""

    def __init__(self) -> None:
        self.model = nn.Linear(4, 2)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def step(self) -> None:
        self.model(torch.randn(3, 4)).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def rows(contents: RingContents) -> list[Mapping[str, float] | None]:
    return [_row(contents, record) for record in contents.records]


def _row(contents: RingContents, record: StepRecord) -> Mapping[str, float] | None:
    if LOGPROBS.name not in record.families:
        return None
    share = [share.family for share in contents.schema.shares].index(LOGPROBS.name)
    return by_name(LOGPROBS.names, record.families[LOGPROBS.name][share].tolist())


def test_records_have_no_place_for_them_until_any_are_reported(watch):
    watched = watch()
    training = Training()
    training.step()
    before = watched.read().schema
    assert not before.columns(LOGPROBS.name)
    assert not any(share.family for share in before.shares)

    watched.probe.observe_logprobs(*logprobs(2, 3))
    training.step()
    contents = read_ring(watched.writer.path, one_schema=False)
    assert [share.family for share in contents.schema.shares if share.family] == [LOGPROBS.name]
    assert len(contents.schema.layers) == len(before.layers), "it has no layers"
    assert [record.sequence for record in contents.records] == [1, 2]


def test_calls_within_a_step_add_up_and_those_after_it_count_for_the_next(watch):
    watched = watch()
    training = Training()
    parts = [logprobs(2, 30, seed=seed) for seed in range(3)]
    watched.probe.observe_logprobs(*parts[0])
    watched.probe.observe_logprobs(*parts[1])
    training.step()
    watched.probe.observe_logprobs(*parts[2])
    training.step()
    training.step()

    first, second, third = rows(watched.read())
    together = [torch.cat(own).double().numpy() for own in zip(*parts[:2], strict=True)]
    for row, arrays in ((first, together), (second, [own.double().numpy() for own in parts[2]])):
        expected = expected_of(*arrays)
        assert row is not None
        assert row["tokens"] == expected.tokens
        assert (k1(row), k3(row)) == pytest.approx((expected.k1, expected.k3), rel=1e-9)
    assert third is None, "nothing was reported in the third step"
    gradients = watched.read().records[0].families[GRADIENTS.name]
    assert np.isfinite(gradients[0, : GRADIENTS.totals]).all(), "gradients are measured as well"


def test_layer_tables_are_written_no_more_often(watch):
    watched = watch()
    training = Training()
    for _ in range(12):
        watched.probe.observe_logprobs(*logprobs(2, 3))
        training.step()
    assert [table.sequence for table in watched.read().layers] == [1, 10]


_GOOD = logprobs(2, 3)[0]


def _freed() -> torch.Tensor:
    tensor = torch.ones(2, 3)
    tensor.untyped_storage().resize_(0)
    return tensor


def _fake() -> torch.Tensor:
    with FakeTensorMode():
        return torch.ones(2, 3)


@pytest.mark.parametrize(
    ("trainer", "sampler", "mask", "reason"),
    [
        (None, None, None, NO_TENSORS),
        (_GOOD.tolist(), _GOOD, None, NO_TENSORS),
        (_GOOD, _GOOD.long(), None, NO_TENSORS),
        (_GOOD, _GOOD.to(torch.complex64), None, NO_TENSORS),
        (_GOOD, _GOOD.to_sparse(), None, NO_TENSORS),
        (_GOOD, "logprobs", None, NO_TENSORS),
        (_GOOD, _GOOD.T, None, SHAPES),
        (_GOOD, _GOOD[:, :2], None, SHAPES),
        (_GOOD, _GOOD, [1, 0, 1], MASK),
        (_GOOD, _GOOD, torch.ones(2, 1), MASK),
        (_GOOD, _GOOD, 1.0, MASK),
        (torch.empty(2, 3, device="meta"), _GOOD, None, PLACES),
        (_freed(), _GOOD, None, INCOMPUTABLE),
        (_GOOD, _GOOD, _freed(), INCOMPUTABLE),
        (_fake(), _GOOD, None, INCOMPUTABLE),
        (_GOOD, _GOOD, torch.ones(2, 3, dtype=torch.uint8).view(torch.bits8), INCOMPUTABLE),
    ],
)
def test_what_cannot_be_compared_is_counted_and_said_once(
    trainer: Any, sampler: Any, mask: Any, reason: str, watch, caplog
):
    watched = watch()
    training = Training()
    for _ in range(2):
        watched.probe.observe_logprobs(trainer, sampler, mask)
    watched.probe.observe_logprobs(_GOOD, _GOOD)
    training.step()

    (row,) = rows(watched.read())
    assert row is not None
    assert (row["refused_calls"], row["tokens"], row["delta_abs_max"]) == (2, 6, 0)
    assert [record.getMessage().count(reason) for record in caplog.records] == [1]
    assert watched.state().unsupported == (reason,)
    assert watched.state().probe_errors == 0


def test_an_empty_tensor_and_odd_formats_are_no_error(watch):
    watched = watch()
    training = Training()
    watched.probe.observe_logprobs(torch.empty(0), torch.empty(0), torch.empty(0))
    watched.probe.observe_logprobs(torch.tensor(-1.0), torch.tensor(-1.5, dtype=torch.bfloat16))
    training.step()
    (row,) = rows(watched.read())
    assert row is not None
    assert (row["tokens"], row["refused_calls"]) == (1, 0)
    assert watched.state().probe_errors == 0


class _Saved:
    """What a graph keeps of the forward pass."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def test_no_graph_is_kept_alive_and_the_arguments_stay_as_they_were(watch):
    watched = watch()
    training = Training()
    kept: list[weakref.ref[_Saved]] = []

    def pack(tensor: torch.Tensor) -> _Saved:
        saved = _Saved(tensor.detach())
        kept.append(weakref.ref(saved))
        return saved

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved.tensor):
        scores = training.model(torch.randn(5, 4))
        trainer = scores.log_softmax(-1)[:, 0]
    sampler, version = trainer.detach().clone(), trainer._version
    gc.collect()
    assert any(each() is not None for each in kept), "the graph is alive"
    watched.probe.observe_logprobs(trainer, sampler)
    assert trainer._version == version
    assert torch.equal(trainer.detach(), sampler)
    del scores, trainer
    gc.collect()
    assert all(each() is None for each in kept)
    training.step()
    (row,) = rows(watched.read())
    assert row is not None
    assert row["tokens"] == 5


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_they_may_be_reported_in_any_mode(mode, watch):
    watched = watch()
    training = Training()
    with mode():
        trainer, sampler = logprobs(2, 3)
        watched.probe.observe_logprobs(trainer, sampler)
    watched.probe.observe_logprobs(trainer, sampler)
    training.step()
    (row,) = rows(watched.read())
    assert row is not None
    assert row["tokens"] == 12
