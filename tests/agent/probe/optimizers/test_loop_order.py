"""Flags of several optimizers become one; gradients that add up are noticed however they do."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard

from mp_agent.probe.optimizers.loop_order import GradientUse, any_of
from mp_agent.probe.optimizers.model_mode import ModelMode
from tests.agent.probe.ranks import run_ranks
from tests.gloo import process_group
from tests.subtests import each

SET, NOT_SET = torch.tensor(1.0), torch.tensor(0.0)


@each(
    ("flags", "expected"),
    [
        ([], None),
        ([None, 0.0], None),
        ([1.0, 0.0, None], 1.0),
        ([1.0, NOT_SET], 1.0),
        ([NOT_SET, SET, 0.0], 1.0),
        ([NOT_SET, None], 0.0),
    ],
)
def test_no_flag_that_is_not_set_hides_one_that_is(flags, expected):
    found = any_of(flags)
    assert found == expected if expected is not None else found is None
    assert any_of(reversed(flags)) == found


def _adding_up(model: nn.Module, *, zeroed: bool) -> list[bool]:
    """Return of each of four steps whether it used gradients of the one before again."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    slots = [SimpleNamespace(parameter=parameter) for parameter in model.parameters()]
    use, found = GradientUse(), []
    for _ in range(4):
        if zeroed:
            use.clearing()
            optimizer.zero_grad(set_to_none=False)
        outputs = model(torch.ones(2, 4))
        use.backward_begins()
        outputs.sum().backward()
        use.backward_ended(scaled=False)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        use.used(lambda: SimpleNamespace(slots=slots))  # type: ignore[arg-type, return-value]
        found.append(bool(use.adds_up))
    return found


def _assert_noticed(rank: int, directory: Path) -> None:
    with process_group(directory, rank, 2):
        model = nn.Linear(4, 4)
        fully_shard(model)
        # What the first step uses is not known before its optimizer has stepped.
        assert _adding_up(model, zeroed=False) == [False, True, True, True]
        assert not any(_adding_up(model, zeroed=True))


@pytest.mark.slow
def test_gradients_that_fsdp2_adds_to_in_place_are_noticed(tmp_path: Path):
    run_ranks(_assert_noticed, tmp_path, ranks=2)
    assert _adding_up(nn.Linear(4, 4), zeroed=False) == [False, True, True, True]
    assert not any(_adding_up(nn.Linear(4, 4), zeroed=True))


def test_another_model_that_no_mode_matters_to_is_not_left_in_evaluation():
    mode = ModelMode()
    dropping = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1)).eval()
    mode.given(dropping, trained_before=True, held=frozenset())
    mode.stepped()
    assert mode.was_left

    mode.given(nn.Linear(2, 2).eval(), trained_before=False, held=frozenset())
    assert not mode.was_left


class _DropsByFunction(nn.Module):
    """Drops as examples of PyTorch Geometric do: with `rate`, which some keep as an attribute."""

    def __init__(self, rate: object = None) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        if rate is not None:
            self.dropout = rate

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        rate = getattr(self, "dropout", 0.5)
        outputs: torch.Tensor = self.layer(F.dropout(inputs, rate, training=self.training))
        return outputs


class _DropsAlways(nn.Module):
    """Drops in evaluation mode as well."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return F.dropout(inputs, 0.5)


@each(
    ("model", "left"),
    [
        (_DropsByFunction(), True),
        (_DropsByFunction(0.1), True),
        (nn.Sequential(nn.Linear(2, 2), _DropsByFunction()), True),
        (_DropsByFunction(0.0), False),
        (_DropsByFunction(nn.Dropout(0.0)), False),
        (_DropsAlways(), False),
    ],
)
def test_a_model_that_drops_by_the_function_alone_is_left_in_evaluation(model, left):
    mode = ModelMode()
    mode.given(model.train(), trained_before=False, held=frozenset())
    mode.stepped()
    mode.given(model.eval(), trained_before=False, held=frozenset())
    mode.stepped()
    assert mode.was_left == left
