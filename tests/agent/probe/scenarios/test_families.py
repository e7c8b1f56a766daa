"""What holds for every family that is measured in the forward pass of a sampled step."""

import copy
import gc
import io
import pickle
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import nan
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from mp_agent.probe.instruments import activation_modules, attention
from mp_agent.records.columns import ACTIVATIONS, ATTENTION, FP8, LOGITS, ROUTERS, ColumnFamily
from tests.agent.probe.scenarios.test_activations import Model as Outputs
from tests.agent.probe.scenarios.test_attention import (
    Attention,
    Whole,
    are_restored,
    by_module,
    loss_of_logits,
)
from tests.agent.probe.scenarios.test_attention import Model as Attending
from tests.agent.probe.scenarios.test_routers import Model as Routed
from tests.agent.probe.scenarios.training import hooks_on, mean_of_squares, train

pytestmark = pytest.mark.usefixtures("nothing_compiled")


@dataclass(frozen=True)
class Family:
    """A model that a family is measured of, and what one pass amounts to."""

    columns: ColumnFamily
    setting: str
    make_model: Callable[[], nn.Module]
    shape: tuple[int, ...]
    """Of the inputs; the first dimension is the batch."""
    row: tuple[str, str, float]
    """A layer, its column that counts, and the count of one pass."""
    in_place: int
    """Hooks on modules, or functions in the place of others, in a sampled step."""
    places: Callable[[nn.Module], int] = hooks_on
    loss_of: Callable[[torch.Tensor], torch.Tensor] = mean_of_squares

    def train(self, model: nn.Module, steps: int, **options: Any) -> None:
        train(model, steps, lambda _: torch.randn(self.shape), loss_of=self.loss_of, **options)

    def count(self, watched: Any, step: int = 2) -> float:
        """What was counted, in the table of a step."""
        layer, column, _ = self.row
        found: float = watched.read(one_schema=False).rows(self.columns)[step][layer][column]
        return found


def replaced(model: nn.Module) -> int:
    """Whether functions are in the place of torch's, which no model shows."""
    return int(not are_restored())


_ATTENDING = partial(
    Family,
    setting="measure_attention",
    make_model=lambda: Attending(nn.Sequential(Whole(True), Whole(False), Attention(by_module))),
    shape=(2, 6, 8),
    in_place=1,
    places=replaced,
    loss_of=loss_of_logits,
)
FAMILIES = [
    Family(ACTIVATIONS, "measure_activations", Outputs, (5, 4), ("head", "elements", 5 * 2.0), 4),
    _ATTENDING(ATTENTION, row=("attention.1.inner", "elements", 2 * 2 * 36.0)),
    _ATTENDING(LOGITS, row=("output", "rows", 12.0)),
    Family(ROUTERS, "measure_routers", Routed, (16, 8), ("router", "tokens", 16.0), 1),
    Family(
        FP8,
        "measure_fp8",
        lambda: nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 1)),
        (16, 8),
        ("0", "tensors", 3.0),
        2,
    ),
]
of_every_family = pytest.mark.parametrize("family", FAMILIES, ids=lambda each: each.columns.name)


@pytest.fixture
def measured(watch: Callable[..., Any], family: Family) -> Callable[[], Any]:
    return lambda: watch(**{family.setting: True})


@of_every_family
class TestEveryFamily:
    def test_nothing_is_measured_unless_asked(self, family, watch):
        model, watched, places = family.make_model(), watch(), []
        family.train(model, 2, between=lambda step: places.append(family.places(model)))
        schema = watched.read().schema
        assert places == [0, 0]
        assert not any(share.family for share in schema.shares)
        assert not schema.columns(family.columns.name), "they would take room in every record"

    def test_hooks_are_there_for_one_forward_pass_only(self, family, measured):
        model, watched, places = family.make_model(), measured(), []
        family.train(model, 20, between=lambda step: places.append(family.places(model)))
        assert [step for step, each in enumerate(places, 1) if each] == [1, 9, 19]
        assert set(places) == {0, family.in_place}
        tables = watched.read(one_schema=False).rows(family.columns)
        assert sorted(tables) == [2, 10, 20], "once the model is known, then as scheduled"

    def test_of_several_micro_batches_the_first_is_measured(self, family, measured):
        model, watched = family.make_model(), measured()
        family.train(model, 10, passes=3)
        assert family.count(watched, 2) == family.count(watched, 10) == family.row[2]

    @pytest.mark.parametrize("way", ["eval", "modes that come back without a call", "phase"])
    def test_an_evaluation_is_left_out(self, family, measured, way):
        model, watched = family.make_model(), measured()
        larger = torch.full((50, *family.shape[1:]), 1e4)

        def evaluate(step: int) -> None:
            if way == "phase":
                with watched.probe.phase("evaluation"):
                    model(larger)
                return
            modes = {module: module.training for module in model.modules()}
            model.eval()
            with torch.no_grad():
                outputs = model(larger)
                if family.columns is LOGITS:
                    F.cross_entropy(outputs.flatten(0, 1), torch.zeros(300, dtype=torch.long))
            if way == "eval":
                model.train()
            for module, training in modes.items():
                module.training = training

        family.train(model, 10, between=evaluate)
        assert family.count(watched, 2) == family.count(watched, 10) == family.row[2]

    def test_recomputation_in_backward_counts_once(self, family, measured):
        model, watched = family.make_model(), measured()
        forward = type(model).forward
        model.forward = lambda inputs: checkpoint(forward, model, inputs, use_reentrant=False)
        family.train(model, 2)
        assert family.count(watched) == family.row[2]

    def test_trouble_is_looked_into_on_the_step_after(self, family, measured):
        model, watched = family.make_model(), measured()
        healthy = copy.deepcopy(model.state_dict())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(1, 8):
            loss = family.loss_of(model(torch.randn(family.shape)))
            (loss * (nan if step == 4 else 1.0)).backward()
            optimizer.step()
            optimizer.zero_grad()
            model.load_state_dict(healthy)
        assert sorted(watched.read(one_schema=False).rows(family.columns)) == [2, 5]

    def test_the_step_of_another_model_comes_before_the_forward(self, family, measured):
        def trained() -> tuple[list[torch.Tensor], list[int]]:
            torch.manual_seed(1)
            model, critic, places = family.make_model(), nn.Linear(3, 1), []
            optimizer = torch.optim.SGD(critic.parameters(), lr=0.1)

            def train_critic(step: int) -> None:
                optimizer.zero_grad()
                critic(torch.ones(2, 3)).square().mean().backward()
                optimizer.step()
                places.append(family.places(model))

            family.train(model, 20, lr=0.01, between=train_critic)
            trained = [*model.parameters(), *critic.parameters()]
            return [parameter.detach() for parameter in trained], places

        (without, _), watched = trained(), measured()
        found, places = trained()
        for before, after in zip(without, found, strict=True):
            assert torch.equal(before, after)
        assert sorted(watched.read(one_schema=False).rows(family.columns)) == [2, 10, 20]
        assert family.count(watched, 2) == family.count(watched, 10) == family.row[2]
        assert [step for step, each in enumerate(places, 1) if each] == [1, 9, 19]
        assert not [each for each in watched.state().unsupported if " call" in each]

    def test_attacks_in_evaluation_mode_come_before_the_forward(self, family, measured):
        model, watched = family.make_model(), measured()

        def attack(step: int) -> None:
            model.eval()
            for _ in range(3):
                larger = torch.full((50, *family.shape[1:]), 1.0, requires_grad=True)
                mean_of_squares(model(larger)).backward()
            model.train()
            model.zero_grad()

        family.train(model, 10, between=attack)
        assert family.count(watched, 2) == family.count(watched, 10) == family.row[2]

    def test_copies_of_a_hooked_model_have_nothing_of_the_probe(self, family, measured):
        model, _ = family.make_model(), measured()
        family.train(model, 1)
        assert family.places(model)
        saved = io.BytesIO()
        torch.save(model, saved)
        saved.seek(0)
        model.eval()
        inputs = torch.randn(family.shape)
        for made in (
            copy.deepcopy(model),
            pickle.loads(pickle.dumps(model)),
            torch.load(saved, weights_only=False).eval(),
        ):
            torch.testing.assert_close(made(inputs), model(inputs))
            assert b"mp_agent" not in pickle.dumps(made)

    def test_detaching_leaves_no_hook(self, family, measured):
        model, watched = family.make_model(), measured()
        family.train(model, 1)
        assert family.places(model)
        watched.probe.detach()
        assert not family.places(model)
        assert not hooks_on(model, but="")

    def test_training_is_the_same_to_the_bit(self, family, measured):
        def trained() -> list[torch.Tensor]:
            torch.manual_seed(1)
            model = family.make_model()
            family.train(model, 11, lr=0.01)
            return [parameter.detach() for parameter in model.parameters()]

        without, watched = trained(), measured()
        for before, after in zip(without, trained(), strict=True):
            assert before.isfinite().all()
            assert torch.equal(before, after)
        contents = watched.read(one_schema=False)
        assert sorted(contents.rows(family.columns)) == [2, 10]
        assert contents.state.probe_errors == 0

    def test_a_model_that_is_gone_is_not_kept(self, family, measured):
        model, watched = family.make_model(), measured()
        references = [weakref.ref(module) for module in model.modules()]
        family.train(model, 9)  # the next step would be sampled
        assert family.places(model)
        del model
        if family.places is replaced:
            watched.probe.detach()  # until then it is held, for the ids of its modules
        gc.collect()
        assert not any(reference() for reference in references)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "reported"),
    [(FAMILIES[0], activation_modules.COMPILED), (FAMILIES[1], attention.COMPILED)],
    ids=["activations", "attention"],
)
def test_compiled_programs_are_reported_and_compile_alike(family, reported, measured):
    dynamo = pytest.importorskip("torch._dynamo")
    testing = pytest.importorskip("torch._dynamo.testing")

    def count(kind: str) -> tuple[int, int]:
        dynamo.reset()
        dynamo.utils.counters.clear()
        graphs = testing.CompileCounter()
        model = family.make_model()
        if kind == "model":
            optimized: Any = torch.compile(model, backend=graphs)
            family.train(optimized, 3, lr=0.1)
        else:
            # A new shape on a step on which modules are hooked compiles once more.
            optimizer = torch.optim.SGD(model.parameters())
            forward = torch.compile(lambda inputs: family.loss_of(model(inputs)), backend=graphs)
            for batch in (5, 6, 7):
                forward(torch.randn(batch, *family.shape[1:])).backward()
                optimizer.step()
        breaks = sum(dynamo.utils.counters["graph_break"].values())
        dynamo.reset()
        dynamo.utils.counters.clear()
        return graphs.frame_count, breaks

    without, watched = [count("model"), count("function")], measured()
    assert [count("model"), count("function")] == without
    assert reported in watched.state().unsupported
