"""Updates of real optimizers in a real loop, as they arrive in the ring, against plain Python."""

from collections.abc import Callable, Mapping
from functools import partial
from math import inf, isnan, sqrt
from typing import Any

import pytest
import torch
from torch import nn

from mp_agent.catalog.metrics.optimizer import below_epsilon, moment_rms
from mp_agent.probe.recording import weight_updates
from mp_agent.records.columns import OPTIMIZER
from tests.agent.probe.small_model import gradient_of, make_loss, make_model
from tests.agent.update_reference import update_reference


@pytest.fixture
def watch(watch: Callable[..., Any]) -> Callable[..., Any]:
    """Attach a probe that measures all families of parameters."""
    return partial(watch, measure_updates=True, measure_distribution=True)


Rows = dict[str, Mapping[str, float]]


class Loop:
    """Trains the small model, and computes what the last step's row of each layer must be."""

    def __init__(self, make: Callable[..., torch.optim.Optimizer], **arguments: Any) -> None:
        self.model = make_model()
        self.dtype = arguments.pop("dtype", torch.float32)
        self.model.to(self.dtype)
        self.optimizer = make(self.model.parameters(), **arguments)
        self.before: dict[str, torch.Tensor] = {}

    def backward(self) -> None:
        loss = self.model(torch.ones(3, 4, dtype=self.dtype)).float().pow(2).mean()
        loss.backward()

    def step(self) -> None:
        self.backward()
        self.before = {n: p.detach().clone() for n, p in self.model.named_parameters()}
        self.optimizer.step()

    def expected(self, moments: str = "", correction: float = 1.0) -> Rows:
        group = self.optimizer.param_groups[0]
        rows: Rows = {}
        for name, weight in self.model.named_parameters():
            state = self.optimizer.state[weight]
            momentum = state.get("exp_avg", state.get("momentum_buffer"))
            moment = state.get(moments)
            rows[name] = update_reference(
                _numbers(weight) or [],
                _numbers(self.before[name]),
                _numbers(weight.grad),
                _numbers(momentum),
                _numbers(moment),
                _numbers(state.get("max_exp_avg_sq")),
                weight_bytes=weight.element_size(),
                moment_format=str(self.dtype).removeprefix("torch."),
                learning_rate=float(group["lr"]),
                correction=correction,
                epsilon=group.get("eps"),
            )
        return rows


def _numbers(tensor: torch.Tensor | None) -> list[float] | None:
    if tensor is None:
        return None
    return [float(value) for value in tensor.detach().double().flatten()]


def rows_of(contents: Any, table: int = -1) -> Rows:
    rows = contents.layers[table].families[OPTIMIZER.name].tolist()
    layers = [layer.name for layer in contents.schema.layers]
    return {
        name: dict(zip(OPTIMIZER.names, row, strict=True))
        for name, row in zip(layers, rows, strict=True)
    }


def assert_same(found: Rows, expected: Rows) -> None:
    assert set(found) == set(expected)
    for name, row in expected.items():
        assert found[name] == pytest.approx(row, rel=1e-10, nan_ok=True), name


@pytest.mark.parametrize(
    ("make", "arguments", "moments", "beta"),
    [
        (torch.optim.SGD, {"lr": 0.1}, "", 0.0),
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}, "", 0.0),
        (torch.optim.Adam, {"lr": 1e-2}, "exp_avg_sq", 0.999),
        (torch.optim.AdamW, {"lr": torch.tensor(1e-2), "foreach": False}, "exp_avg_sq", 0.999),
        (torch.optim.AdamW, {"lr": 1e-2, "fused": True}, "exp_avg_sq", 0.999),
        (torch.optim.AdamW, {"lr": 1e-2, "amsgrad": True, "eps": 1e-3}, "exp_avg_sq", 0.999),
        (torch.optim.RMSprop, {"lr": 1e-2}, "square_avg", 0.0),
        (torch.optim.AdamW, {"lr": 1e-4, "dtype": torch.bfloat16}, "exp_avg_sq", 0.999),
    ],
)
def test_layers_and_totals_equal_the_reference(watch, make, arguments, moments, beta):
    watched, loop = watch(layer_interval=1), Loop(make, **arguments)
    for count in range(1, 4):
        loop.step()
        contents = watched.read()
        expected = loop.expected(moments, correction=1.0 - beta**count)
        assert_same(rows_of(contents), expected)
        totals = dict(
            zip(OPTIMIZER.names, contents.records[-1].families["optimizer"][0], strict=True)
        )
        assert totals == pytest.approx(
            {
                column.name: column.algebra.merged([row[column.name] for row in expected.values()])
                for column in OPTIMIZER.columns
            },
            rel=1e-10,
            nan_ok=True,
        )
        loop.optimizer.zero_grad()
    assert watched.read().state.probe_errors == 0


def test_nothing_is_measured_between_samples_nor_when_switched_off(watch):
    watched, loop = watch(layer_interval=1000), Loop(torch.optim.SGD, lr=0.1)
    for _ in range(2):
        loop.step()
    first, second = watched.read().records
    assert "optimizer" in first.families
    assert "optimizer" not in second.families
    watched.close()

    for switched_off in ("measure_updates", "measure_distribution"):
        watched, loop = watch(**{switched_off: False}), Loop(torch.optim.SGD, lr=0.1)
        loop.step()
        contents = watched.read()
        of_other = {"measure_updates": "distribution", "measure_distribution": "optimizer"}
        expected = {"gradients", of_other[switched_off]}
        assert set(contents.records[0].families) == expected
        assert set(contents.layers[0].families) == expected
        watched.close()


def test_layers_beyond_the_memory_for_copies_have_a_norm_and_no_update(watch):
    watched = watch(layer_interval=1, update_copy_mib=160 / 2**20)
    loop = Loop(torch.optim.SGD, lr=0.1)
    loop.step()
    contents = watched.read()
    rows = rows_of(contents)
    assert rows["0.weight"]["compared_elements"] == 32.0
    assert rows["0.bias"]["compared_elements"] == 8.0
    assert isnan(rows["2.weight"]["compared_elements"])
    assert rows["2.weight"]["weight_sum_squares"] > 0.0
    assert contents.state.unsupported == ("updates of weights beyond update_copy_mib",)


def test_memory_that_runs_out_ends_the_copies_and_not_the_training(watch, monkeypatch):
    def no_memory(*_: object) -> None:
        raise torch.OutOfMemoryError("planted")

    watched, loop = watch(layer_interval=1), Loop(torch.optim.SGD, lr=0.1)
    monkeypatch.setattr(weight_updates, "part_of", no_memory)
    for _ in range(2):
        loop.step()
    contents = watched.read()
    assert len(contents.records) == 2
    assert contents.gradients(1)["sum_squares"] > 0.0
    assert contents.state.probe_errors == 0
    assert "there is no memory" in contents.state.unsupported[0]


def test_a_step_that_the_scaler_skipped_has_no_rows(watch):
    watched, loop = watch(layer_interval=1), Loop(torch.optim.SGD, lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    for gradient in (float("inf"), 1.0):
        scaler.scale(make_loss(loop.model)).backward()
        first = next(loop.model.parameters()).grad
        assert first is not None
        first[0, 0] = gradient
        scaler.step(loop.optimizer)
        scaler.update()
        loop.optimizer.zero_grad()
    skipped, stepped = watched.read().records
    assert "optimizer" not in skipped.families
    assert stepped.families["optimizer"][0, OPTIMIZER.names.index("update_sum_squares")] > 0.0


def test_gradients_are_those_that_the_optimizer_saw(watch):
    """Unscaled and clipped, though both were measured before the clipping."""
    watched, loop = watch(layer_interval=1), Loop(torch.optim.Adam, lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    scaler.scale(make_loss(loop.model)).backward()
    scaler.unscale_(loop.optimizer)
    nn.utils.clip_grad_norm_(loop.model.parameters(), 1e-3)
    scaler.step(loop.optimizer)
    for row in rows_of(watched.read()).values():
        # On the first step the corrected second moment is the squared gradient itself.
        assert sqrt(row["squared_ratio_sum"] / row["active_elements"]) == pytest.approx(1, abs=1e-4)


def test_each_of_several_optimizers_has_its_own_rows(watch):
    watched, model = watch(layer_interval=1), make_model()
    slow = torch.optim.SGD(model[0].parameters(), lr=0.1)
    fast = torch.optim.SGD(model[2].parameters(), lr=0.5)
    for _ in range(4):
        make_loss(model).backward()
        slow.step()
        fast.step()
        slow.zero_grad()
        fast.zero_grad()
    watched.probe.flush()
    rows = rows_of(watched.read())
    assert [rows[name]["learning_rate"] for name in ("0.weight", "2.weight")] == [0.1, 0.5]
    assert rows["2.weight"]["update_sum_squares"] > 0.0


def test_odd_state_is_left_out(watch):
    """State in another shape, as of Adafactor, says nothing of single elements."""
    watched = watch(layer_interval=1)
    loop = Loop(torch.optim.Adafactor, lr=1e-2)
    loop.step()
    contents = watched.read()
    assert isnan(rows_of(contents)["0.weight"]["moment_elements"])
    assert rows_of(contents)["0.weight"]["compared_elements"] == 32.0
    assert contents.state.probe_errors == 0


def test_copies_do_not_outlive_the_step(watch):
    watched, loop = watch(layer_interval=1), Loop(torch.optim.SGD, lr=0.1)
    loop.step()
    on = watched.probe._instruments._on
    assert [each._kept for each in on if isinstance(each, weight_updates.WeightUpdates)] == [{}]


class _ReusesGradients(torch.optim.Adam):
    """Makes the update in place of the gradient, as schedule-free AdamW does."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        for parameter, state in self.state.items():
            gradient_of(parameter).div_(state["exp_avg_sq"].sqrt() + 1e-8)


class _Rotates(torch.optim.Adam):
    """Averages the squares of gradients in another basis, as SOAP does."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        for state in self.state.values():
            state["exp_avg_sq"].copy_(state["exp_avg_sq"].flip(0))


@pytest.mark.parametrize(
    ("make", "is_there"),
    [(torch.optim.Adam, True), (_ReusesGradients, False), (_Rotates, False)],
)
def test_gradients_are_compared_with_moments_of_their_own_alone(watch, make, is_there):
    watched, loop = watch(layer_interval=1), Loop(make, lr=1e-2)
    loop.step()
    rows = rows_of(watched.read())
    assert all((row["squared_ratio_sum"] >= 0.0) is is_there for row in rows.values())
    assert all((moment_rms(row) is not None) is is_there for row in rows.values())
    assert all(row["active_elements"] > 0.0 for row in rows.values())


class _CountsInGroup(torch.optim.Adam):
    """Counts its steps in the group, as timm's LAMB and Apex' FusedAdam do."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for state in self.state.values():
            state["step"] = torch.tensor(float(self._count))
        super().step(closure)
        self._count += 1
        for state in self.state.values():
            del state["step"]

    @property
    def _count(self) -> int:
        return int(self.param_groups[0].get("step", 0))

    @_count.setter
    def _count(self, count: int) -> None:
        self.param_groups[0]["step"] = count


class _CountsByItself(_CountsInGroup):
    """Counts its steps where no other code looks."""

    _count = 0


def test_the_bias_of_moments_is_known_from_a_count_in_the_group(watch):
    """Without it, gradients seem to have outgrown the second moment of the first steps."""
    watched, loop = watch(layer_interval=1), Loop(_CountsInGroup, lr=1e-2)
    for _ in range(3):
        loop.step()
    rms = [moment_rms(row) for row in rows_of(watched.read()).values()]
    assert rms
    assert all(value is not None and 0.5 < value < 2.0 for value in rms)


def test_moments_of_an_unknown_number_of_steps_are_compared_with_nothing(watch):
    watched, loop = watch(layer_interval=1), Loop(_CountsByItself, lr=1e-2)
    loop.step()
    rows = rows_of(watched.read())
    assert all(moment_rms(row) is None and below_epsilon(row) is None for row in rows.values())
    assert all(row["moment_elements"] > 0.0 for row in rows.values())


def test_moments_that_are_foreign_on_one_shard_are_compared_on_none() -> None:
    """Absent there alone, the mean would be of one shard's ratios over both shards' elements."""
    (ratios,) = (one.algebra for one in OPTIMIZER.columns if one.name == "squared_ratio_sum")
    merged = {"active_elements": 8.0, "squared_ratio_sum": ratios.merged([4.0, -inf])}
    assert moment_rms(merged) is None
    assert moment_rms({**merged, "squared_ratio_sum": ratios.merged([4.0, 4.0])}) == 1.0
