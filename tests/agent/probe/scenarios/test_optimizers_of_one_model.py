"""Several optimizers for one model: the run is all together, each is reported as well."""

import gc
from collections.abc import Iterator, Sequence
from math import inf, isnan, nan, sqrt

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer

from mp_agent.probe.optimizers import live_objects
from mp_agent.probe.optimizers.registry import NORM_LEFT_OUT
from mp_agent.records.merged import MergedStep
from tests.agent.probe.conftest import Watch
from tests.agent.probe.rings import merge_layer_tables, merge_rings, read_ring
from tests.agent.probe.small_model import gradient_of, make_loss, make_model, sum_squares

STEPS = 6
ALL = {
    "measure_activations": True,
    "measure_updates": True,
    "measure_distribution": True,
    "measure_local_gradients": True,
}
"""What makes the records of a schema large."""


def split(model: nn.Module) -> list[torch.optim.Optimizer]:
    """Muon for the matrices, AdamW for the rest, as is becoming usual."""
    matrices = [parameter for parameter in model.parameters() if parameter.dim() == 2]
    rest = [parameter for parameter in model.parameters() if parameter.dim() != 2]
    # Older torch has no Muon, and which optimizer it is does not matter here.
    of_matrices = getattr(torch.optim, "Muon", torch.optim.SGD)
    return [of_matrices(matrices, lr=1e-3), torch.optim.AdamW(rest, lr=1e-3)]


def _optimizers_left() -> list[Optimizer]:
    """Return what earlier tests have left; some of it was never initialized."""
    found = [each for each in gc.get_objects() if issubclass(type(each), Optimizer)]
    return [each for each in found if "param_groups" in vars(each)]


def norm_of(optimizer: torch.optim.Optimizer) -> float:
    gradients = [p.grad for group in optimizer.param_groups for p in group["params"]]
    return sqrt(sum(float(g.double().pow(2).sum()) for g in gradients if g is not None))


def merged(watched: Watch) -> list[MergedStep]:
    watched.probe.flush()
    return merge_rings({0: read_ring(watched.writer.path, one_schema=False)})


class Norms:
    """What the gradients of a model were before each step, by a float64 reference."""

    def __init__(self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self.model, self.optimizers = model, optimizers
        self.run: list[float] = []
        self.parts: dict[str, list[float]] = {str(i): [] for i in range(len(optimizers))}

    def note(self, scale: float = 1.0) -> None:
        self.run.append(sqrt(sum_squares(self.model)) / scale)
        for name, optimizer in enumerate(self.optimizers):
            self.parts[str(name)].append(norm_of(optimizer) / scale)

    def assert_seen(self, steps: list[MergedStep]) -> None:
        assert [step.grad_norm for step in steps] == pytest.approx(self.run, rel=1e-6)
        assert all(step.gradients_complete for step in steps)
        for name, norms in self.parts.items():
            seen = [step.optimizers[name].grad_norm for step in steps]
            assert seen == pytest.approx(norms, rel=1e-6)


def backward(model: nn.Module, optimizers: list[torch.optim.Optimizer], seed: int) -> None:
    for optimizer in optimizers:
        optimizer.zero_grad()
    make_loss(model, seed).backward()


def train_clipped(model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> list[float]:
    """Train some steps, clipped far down; return the norms before clipping."""
    norms = []
    for seed in range(STEPS):
        backward(model, optimizers, seed)
        norms.append(sqrt(sum_squares(model)))
        clip_grad_norm_(model.parameters(), 1e-4)
        for optimizer in optimizers:
            optimizer.step()
    return norms


class _Unseen(torch.optim.Optimizer):
    """Two optimizers in one that never called its base's constructor: torch hooks none of it."""

    def __init__(self, parts: list[torch.optim.Optimizer]) -> None:
        self.parts = parts
        self.param_groups = [group for part in parts for group in part.param_groups]

    def step(self, closure=None):
        for part in self.parts:
            part.step()


class TestNorm:
    @pytest.mark.slow
    @pytest.mark.parametrize("clips", ["never", "all", "each"])
    @pytest.mark.parametrize("backwards", [False, True])
    def test_is_over_all_parameters_before_any_clipping(self, watch, clips, backwards):
        watched, model = watch(), make_model()
        optimizers = split(model)
        norms = Norms(model, optimizers[::-1] if backwards else optimizers)
        for seed in range(STEPS):
            backward(model, optimizers, seed)
            norms.note()
            if clips == "all":
                clip_grad_norm_(model.parameters(), 1e-4)
            for optimizer in norms.optimizers:
                if clips == "each":
                    clip_grad_norm_(optimizer.param_groups[0]["params"], 1e-4)
                optimizer.step()
        steps = merged(watched)
        # Clipped together, they come in the order of the model.
        norms.parts = norms.parts if clips != "all" else {}
        norms.assert_seen(steps)
        assert watched.steps_reported == STEPS
        assert [step.clip_coefficient is not None for step in steps] == [clips != "never"] * STEPS

    def test_of_clipping_is_the_model_s_where_all_are_clipped_together(self, watch):
        watched, model = watch(), make_model()
        optimizers = split(model)
        for seed in range(STEPS):
            backward(model, optimizers, seed)
            clip_grad_norm_(model.parameters(), 0.5)
            for optimizer in optimizers:
                optimizer.step()
        for step in merged(watched):
            assert step.get("clip_norm") == pytest.approx(step.grad_norm, rel=1e-6)

    def test_clipping_apart_shows_the_coefficient_of_what_was_shrunk_more(self, watch):
        watched, model = watch(), make_model()
        optimizers = split(model)
        expected = []
        for seed in range(STEPS):
            backward(model, optimizers, seed)
            limits = [1e3, 1e-3] if seed % 2 else [1e-3, 1e3]
            expected.append(1e-3 / (norm_of(optimizers[seed % 2]) + 1e-6))
            for optimizer, limit in zip(optimizers, limits, strict=True):
                clip_grad_norm_(optimizer.param_groups[0]["params"], limit)
                optimizer.step()
        assert [s.clip_coefficient for s in merged(watched)] == pytest.approx(expected, rel=1e-4)

    def test_clipping_apart_is_seen_of_both_where_closures_do_nothing(self, watch):
        """Lightning passes such a closure to whatever is stepped by hand."""
        watched, model = watch(), make_model()
        optimizers = split(model)
        expected = []
        for seed in range(STEPS):
            backward(model, optimizers, seed)
            expected.append(1e-3 / (norm_of(optimizers[1]) + 1e-6))
            for optimizer, limit in zip(optimizers, [1e3, 1e-3], strict=True):
                clip_grad_norm_(optimizer.param_groups[0]["params"], limit)
                optimizer.step(lambda: None)  # type: ignore[arg-type, return-value] # no loss
        assert [s.clip_coefficient for s in merged(watched)] == pytest.approx(expected, rel=1e-4)

    def test_is_over_both_where_a_wrapper_steps_them_unseen_by_torch(self, watch):
        watched, model = watch(), make_model()
        both = _Unseen(split(model))
        norms = Norms(model, both.parts)
        for seed in range(STEPS):
            backward(model, both.parts, seed)
            norms.note()
            clip_grad_norm_(model.parameters(), 1e-4)
            both.step()
        norms.parts = {}
        norms.assert_seen(merged(watched))
        assert watched.steps_reported == STEPS

    def test_goes_on_where_one_steps_every_third_iteration(self, watch):
        watched, model = watch(), make_model()
        often, seldom = split(model)
        norms = Norms(model, [often, seldom])
        for seed in range(9):
            often.zero_grad()
            make_loss(model, seed).backward()
            norms.note()
            often.step()
            if seed % 3 == 2:
                seldom.step()
                seldom.zero_grad()
        norms.assert_seen(merged(watched))
        assert watched.steps_reported == 9

    def test_counts_all_iterations_where_the_named_one_steps_seldom(self, watch):
        model = make_model()
        often, seldom = split(model)
        watched = watch(optimizer=seldom)
        norms = Norms(model, [seldom, often])
        for seed in range(9):
            often.zero_grad()
            make_loss(model, seed).backward()
            norms.note()
            if seed % 3 == 0:
                seldom.step()
                seldom.zero_grad()
            often.step()
        norms.assert_seen(merged(watched))
        assert watched.steps_reported == 9

    @pytest.mark.slow
    @pytest.mark.parametrize("made_when", ["before", "then"])
    def test_counts_a_part_from_the_step_on_at_which_it_is_unfrozen(self, watch, made_when):
        watched, model = watch(), make_model()
        head = torch.optim.SGD(model[2].parameters(), lr=1e-3)
        model[0].requires_grad_(False)
        made = [torch.optim.AdamW(model[0].parameters())] if made_when == "before" else []
        expected = []
        for seed in range(6):
            if seed == 3:
                model[0].requires_grad_(True)
                made = made or [torch.optim.AdamW(model[0].parameters())]
            model.zero_grad()
            make_loss(model, seed).backward()
            expected.append(sqrt(sum_squares(model)))
            head.step()
            if seed >= 3:
                made[0].step()
        steps = merged(watched)
        assert [step.grad_norm for step in steps] == pytest.approx(expected, rel=1e-6)
        assert [set(step.optimizers) for step in steps] == [set()] * 3 + [{"0", "1"}] * 3

    @pytest.mark.slow
    def test_follows_parameters_that_move_from_one_to_the_other(self, watch):
        watched, model = watch(), make_model()
        matrices, rest = split(model)
        norms = Norms(model, [matrices, rest])
        for seed in range(STEPS):
            if seed == 3:
                moved = matrices.param_groups[0]["params"].pop()
                rest.add_param_group({"params": [moved]})
            backward(model, [matrices, rest], seed)
            norms.note()
            matrices.step()
            rest.step()
        norms.assert_seen(merged(watched))

    def test_leaves_out_what_has_no_gradient_at_all(self, watch):
        watched, model = watch(), make_model()
        optimizers = [torch.optim.SGD(model[i].parameters(), lr=1e-3) for i in (0, 2)]
        expected = []
        for seed in range(4):
            model.zero_grad()
            make_loss(model, seed).backward()
            if seed == 2:
                model[2].zero_grad()
            expected.append(sqrt(sum_squares(model)))
            for optimizer in optimizers:
                optimizer.step()
        steps = merged(watched)
        assert [step.grad_norm for step in steps] == pytest.approx(expected, rel=1e-6)
        assert all(step.gradients_judged for step in steps)
        assert ["1" in step.optimizers for step in steps] == [True, True, False, True]

    @pytest.mark.slow
    def test_is_over_bare_parameters_too(self, watch):
        # What earlier tests have left must not look like a part of this one's model.
        for left in _optimizers_left():
            left.zero_grad()
        watched = watch()
        weights = [torch.randn(3, requires_grad=True) for _ in range(2)]
        optimizers = [torch.optim.SGD([weight], lr=0.1) for weight in weights]
        expected = []
        for _ in range(3):
            for optimizer in optimizers:
                optimizer.zero_grad()
            torch.stack([weight.pow(2).sum() for weight in weights]).sum().backward()
            expected.append(sqrt(sum(norm_of(optimizer) ** 2 for optimizer in optimizers)))
            for optimizer in optimizers:
                optimizer.step()
        assert [s.grad_norm for s in merged(watched)] == pytest.approx(expected, rel=1e-6)

    def test_counts_nothing_twice_where_one_optimizer_steps_the_others(self, watch):
        watched, model = watch(), make_model()
        parts = split(model)
        container = _Container(parts)
        expected = []
        for seed in range(4):
            backward(model, parts, seed)
            expected.append(sqrt(sum_squares(model)))
            if seed < 2:
                for part in parts:
                    part.step()
            else:
                container.step()
        steps = merged(watched)
        assert [step.grad_norm for step in steps] == pytest.approx(expected, rel=1e-6)
        assert set(steps[-1].optimizers) == set()

    def test_forgets_an_optimizer_that_never_steps(self, watch):
        watched, model = watch(), make_model()
        used = torch.optim.SGD(model[0].parameters(), lr=0.0)
        unused = torch.optim.SGD(model[2].parameters(), lr=0.0)
        for seed in range(110):
            used.zero_grad()
            make_loss(model, seed).backward()
            used.step()
        steps = merged(watched)
        assert len(steps) == 110
        assert set(steps[0].optimizers) == {"0", "1"}
        assert set(steps[-1].optimizers) == set()
        assert steps[-1].grad_norm == pytest.approx(norm_of(used), rel=1e-6)
        del unused


class TestNonfinite:
    @pytest.mark.slow
    @pytest.mark.parametrize("where", [0, 1])
    @pytest.mark.parametrize("at", [0, 3])
    def test_is_of_the_step_at_which_it_came(self, watch, where, at):
        watched, model = watch(), make_model()
        optimizers = split(model)
        for seed in range(5):
            backward(model, optimizers, seed)
            if seed == at:
                optimizers[where].param_groups[0]["params"][0].grad.view(-1)[0] = nan
            for optimizer in optimizers:
                optimizer.step()
            for parameter in model.parameters():
                parameter.data.nan_to_num_()
            for optimizer in optimizers:
                optimizer.state.clear()
        steps = merged(watched)
        assert [step.gradient_nonfinite_elements for step in steps] == [
            float(number == at) for number in range(5)
        ]
        blamed = {name: own.nonfinite_elements for name, own in steps[at].optimizers.items()}
        assert blamed == {str(where): 1.0, str(1 - where): 0.0}
        assert not any(step.flag("loss_nonfinite") for step in steps)

    def test_names_the_layer_nearest_the_output_whichever_optimizer_steps_it(self, watch):
        watched, model = watch(), make_model()
        optimizers = split(model)
        backward(model, optimizers, 0)
        for layer, part in ((0, "bias"), (2, "weight")):
            getattr(model[layer], part).grad.view(-1)[0] = nan
        for optimizer in optimizers:
            optimizer.step()
        watched.probe.flush()
        rings = {0: read_ring(watched.writer.path, one_schema=False)}
        layers = merge_layer_tables(rings)[1]
        assert layers.names == ("0.weight", "0.bias", "2.weight", "2.bias")
        assert layers.nonfinite_nearest_output() == "2.weight"
        elements = [view.values["elements"] for view in layers.views(step_judged=True)]
        assert elements == [32, 8, 16, 2]


@pytest.mark.parametrize("explicit", [False, True])
@pytest.mark.parametrize("fused", [False, True])
class TestUnderOneScaler:
    def train(self, watch, fused: bool, explicit: bool, poisoned: tuple[int, ...] = ()):
        watched, model = watch(), make_model()
        parts = [model[0], model[2]]
        optimizers = [torch.optim.AdamW(p.parameters(), lr=1e-3, fused=fused) for p in parts]
        norms = Norms(model, optimizers)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
        for seed in range(4):
            scale = scaler.get_scale()
            model.zero_grad()
            scaler.scale(make_loss(model, seed)).backward()
            for part in poisoned if seed == 2 else ():
                gradient = next(parts[part].parameters()).grad
                assert gradient is not None
                gradient[0, 0] = inf
            norms.note(scale)
            for optimizer in optimizers:
                if explicit:
                    scaler.unscale_(optimizer)
            if explicit:
                clip_grad_norm_(model.parameters(), 1e-3)
            for optimizer in optimizers:
                scaler.step(optimizer)
            scaler.update()
        return watched, norms, merged(watched)

    @pytest.mark.slow
    def test_all_values_are_unscaled(self, watch, fused, explicit):
        watched, norms, steps = self.train(watch, fused, explicit)
        norms.assert_seen(steps)
        assert not any(step.skipped for step in steps)
        assert [step.get("loss_scale") for step in steps] == [1024.0, 1024.0, 2048.0, 2048.0]
        assert watched.state().probe_errors == 0

    @pytest.mark.slow
    @pytest.mark.parametrize("poisoned", [(0,), (1,), (0, 1)])
    def test_a_step_of_which_any_part_was_skipped_is_skipped(
        self, watch, fused, explicit, poisoned
    ):
        watched, norms, steps = self.train(watch, fused, explicit, poisoned)
        assert [step.skipped for step in steps] == [False, False, True, False]
        assert steps[2].gradient_nonfinite_elements == len(poisoned)
        assert steps[3].grad_norm == pytest.approx(norms.run[3], rel=1e-6)
        assert watched.steps_reported == 4


class _Gan(nn.Module):
    """Both parts in one module, as Lightning has it."""

    def __init__(self) -> None:
        super().__init__()
        self.generator, self.critic = make_model(1), nn.Linear(2, 1)


class TestApart:
    """Parts of one module that are trained by a backward each."""

    @pytest.mark.slow
    @pytest.mark.parametrize("critic_first", [False, True])
    @pytest.mark.parametrize("critic_steps", [1, 3])
    def test_are_measured_and_counted_each_by_itself(self, watch, critic_first, critic_steps):
        watched, model = watch(), _Gan()
        own: dict[nn.Module, list[float]] = {model.generator: [], model.critic: []}
        optimizers = {part: torch.optim.SGD(part.parameters(), lr=1e-3) for part in own}

        def train(part: nn.Module, seed: int) -> None:
            model.zero_grad()
            noise = torch.randn(3, 4, generator=torch.Generator().manual_seed(seed))
            made = model.generator(noise)
            if part is model.critic:
                model.critic(made.detach()).mean().neg().backward()
            else:
                model.critic(made).mean().backward()
            own[part].append(sqrt(sum_squares(part)))
            optimizers[part].step()

        order: list[nn.Module] = [model.critic] * critic_steps
        order = [*order, model.generator] if critic_first else [model.generator, *order]
        for seed in range(5):
            for part in order:
                train(part, seed)
        steps = merged(watched)
        first = order[0]
        assert [step.grad_norm for step in steps] == pytest.approx(own[first], rel=1e-6)
        assert watched.steps_reported == len(steps) == len(own[first])
        assert all(step.gradients_complete for step in steps)
        if critic_steps == 1:
            second = [step.optimizers["1"].grad_norm for step in steps if step.optimizers]
            assert second == pytest.approx(own[order[1]][-len(second) :], rel=1e-6)
            assert len(second) >= 4
        assert not any(other.joint for step in steps[1:] for other in step.optimizers.values())

    def test_add_no_step_at_the_end_that_the_trainer_did_not_make(self, watch):
        watched = watch()
        models = make_model(1), make_model(2)
        optimizers = [torch.optim.SGD(model.parameters(), lr=1e-3) for model in models]
        for number in range(3):
            for model, optimizer in zip(models, optimizers, strict=True):
                for _ in range(1 if model is models[0] else 2):
                    make_loss(model, number).backward()
                    optimizer.step()
        watched.probe.flush()
        contents = read_ring(watched.writer.path, one_schema=False)
        assert len(contents.records) == 3
        assert contents.open_record is None


class _Container(torch.optim.Optimizer):
    """Steps others, as torchtitan's does."""

    def __init__(self, parts: list[torch.optim.Optimizer]) -> None:
        parameters = [p for part in parts for group in part.param_groups for p in group["params"]]
        super().__init__(parameters, {})
        self.parts = parts

    def step(self, closure=None):
        for part in self.parts:
            part.step()


class TestOneAfterTheOther:
    """Trainings in one process whose optimizers all live on, as those of folds in a list."""

    @staticmethod
    def train(
        models: list[nn.Module], lengths: list[int], parts: list[nn.Module] | None = None
    ) -> Iterator[tuple[float, float]]:
        trained = parts or models
        optimizers = [torch.optim.SGD(part.parameters(), lr=1e-3) for part in trained]
        for model, optimizer, length in zip(models, optimizers, lengths, strict=True):
            for seed in range(length):
                optimizer.zero_grad()
                loss = make_loss(model, seed)
                loss.backward()
                norm = sqrt(sum_squares(model))
                optimizer.step()
                yield norm, loss.item()

    @pytest.mark.slow
    @pytest.mark.parametrize("lengths", [[40] * 5, [2, 7, 3]])
    def test_all_steps_count_with_their_own_norm_and_loss(self, watch, lengths):
        watched = watch()
        expected = list(self.train([make_model(i) for i in range(len(lengths))], lengths))
        steps = merged(watched)
        assert watched.steps_reported == len(steps) == sum(lengths)
        assert [step.sequence for step in steps] == list(range(1, sum(lengths) + 1))
        assert [step.grad_norm for step in steps] == pytest.approx(
            [norm for norm, _ in expected], rel=1e-6
        )
        assert [step.get("loss") for step in steps] == pytest.approx(
            [loss for _, loss in expected], rel=1e-6
        )
        assert all((step.get("step_seconds") or 0.0) > 0.0 for step in steps[1:])
        assert watched.state().probe_errors == 0

    @pytest.mark.parametrize("backwards", [1, 2])
    def test_all_steps_count_where_backwards_without_a_step_are_left_over(self, watch, backwards):
        """Micro-batches at the end of an epoch, a last evaluation of loss and gradient."""
        watched, kept = watch(), []
        for number in range(3):
            kept.append((model := make_model(number), torch.optim.SGD(model.parameters())))
            for seed in range(4):
                kept[-1][1].zero_grad()
                make_loss(model, seed).backward()
                kept[-1][1].step()
            for seed in range(backwards):
                make_loss(model, seed).backward()
        assert watched.steps_reported == 12

    @pytest.mark.parametrize("keeps", [False, True])
    def test_the_next_models_first_loss_is_without_those_left_over(self, watch, keeps):
        """Four micro-batches a step, of which two are left over at the end of an epoch."""
        watched, kept, expected = watch(), [], []
        for number in range(3):
            model = make_model(number)
            optimizer = torch.optim.SGD(model.parameters())
            kept += [(model, optimizer)] if keeps else []
            for seed in range(18):
                loss = make_loss(model, seed)
                loss.backward()
                expected += [0.0] * (seed % 4 == 0 and seed < 16)
                expected[-1] += loss.item() if seed < 16 else 0.0
                if seed % 4 == 3:
                    optimizer.step()
                    optimizer.zero_grad()
        losses = [step.get("loss") for step in merged(watched)]
        assert losses == pytest.approx(expected, rel=1e-6)

    @pytest.mark.parametrize("clears", [False, True])
    def test_the_next_models_first_loss_is_without_those_of_a_fit_by_hand(self, watch, clears):
        """It is absent where nothing shows which losses are of its own gradients."""
        watched, expected = watch(), []

        def train(model: nn.Module) -> None:
            optimizer = torch.optim.SGD(model.parameters())
            for seed in range(3):
                if clears or seed:
                    optimizer.zero_grad()
                (loss := make_loss(model, seed)).backward()
                expected.append(loss.item())
                optimizer.step()

        train(make_model(0))
        by_hand = make_model(1)
        for seed in range(5):
            make_loss(by_hand, seed).backward()
        train(make_model(2))
        losses = [step.get("loss") for step in merged(watched)]
        if not clears:
            assert losses.pop(3) is None
            del expected[3]
        assert losses == pytest.approx(expected, rel=1e-6)

    @pytest.mark.slow
    def test_of_the_same_model_count_too(self, watch):
        watched, model = watch(), make_model()
        parts = [model, model[2], model[0], model]
        expected = list(self.train([model] * 4, [5] * 4, parts))
        assert watched.steps_reported == len(merged(watched)) == len(expected)

    @pytest.mark.slow
    @pytest.mark.parametrize("made", ["all before", "each then"])
    def test_all_steps_count_where_several_optimizers_train_each_model(self, watch, made):
        watched, expected = watch(), []
        models = [make_model(seed) for seed in range(3)]
        kept = [split(model) for model in models] if made == "all before" else []
        for number, model in enumerate(models):
            optimizers = kept[number] if number < len(kept) else split(model)
            kept.append(optimizers)
            expected += train_clipped(model, optimizers)
        steps = merged(watched)
        assert watched.steps_reported == len(steps) == len(expected)
        assert [step.grad_norm for step in steps] == pytest.approx(expected, rel=1e-6)
        coefficients = [step.clip_coefficient for step in steps]
        assert all(each is not None and each < 1.0 for each in coefficients)
        assert all(set(step.optimizers) >= {"0", "1"} for step in steps)

    @pytest.mark.slow
    @pytest.mark.parametrize("looks", [0, 1, 2, 4])
    @pytest.mark.parametrize("made", ["all before", "each then"])
    def test_first_steps_are_measured_before_clipping_when_few_scans_of_objects_are_left(
        self, watch, monkeypatch, made, looks
    ):
        monkeypatch.setattr(live_objects, "WALKS_FREE", looks)
        monkeypatch.setattr(live_objects, "WALK_SHARE", 0.0)
        watched, expected = watch(), []
        models = [make_model(seed) for seed in range(3)]
        kept = [split(model) for model in models] if made == "all before" else []
        gc.collect()  # nothing of them is young
        for number, model in enumerate(models):
            optimizers = kept[number] if number < len(kept) else split(model)
            kept.append(optimizers)
            gc.collect()
            expected += train_clipped(model, optimizers)
        steps = merged(watched)
        assert watched.steps_reported == len(steps) == len(expected)
        assert [step.grad_norm for step in steps] == pytest.approx(expected, rel=1e-6)
        assert [step.gradients_complete for step in steps] == [True] * len(expected)
        names = {layer.name for layer in watched.read().schema.layers}
        assert names == {"0.weight", "0.bias", "2.weight", "2.bias"}

    @pytest.mark.slow
    def test_the_next_models_first_step_is_measured_unclipped_among_many_optimizers(self, watch):
        others = [torch.optim.SGD([torch.ones(1, requires_grad=True)]) for _ in range(100)]
        gc.collect()
        models = [make_model(seed) for seed in range(2)]
        kept = [split(model) for model in models]
        watched, expected = watch(), []
        for model, optimizers in zip(models, kept, strict=True):
            expected += train_clipped(model, optimizers)
        seen = [step.grad_norm for step in merged(watched)]
        assert seen == pytest.approx(expected, rel=1e-6)
        del others

    @pytest.mark.slow
    def test_the_first_step_is_measured_before_clipping_after_one_without_optimizer(self, watch):
        watched, model = watch(), make_model()
        make_loss(model, 0).backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizers = split(model)
        expected = train_clipped(model, optimizers)
        seen = [step.grad_norm for step in merged(watched)]
        assert seen == pytest.approx(expected, rel=1e-6)

    def test_a_second_stage_counts_after_two_models_were_trained_in_turns(self, watch):
        watched = watch()
        first, second = make_model(1), make_model(2)
        optimizers = [torch.optim.SGD(model.parameters(), lr=1e-3) for model in (first, second)]
        for seed in range(10):
            for model, optimizer in zip((first, second), optimizers, strict=True):
                make_loss(model, seed).backward()
                optimizer.step()
        for seed in range(100):
            make_loss(second, seed).backward()
            optimizers[1].step()
        watched.probe.flush()
        assert 90 <= watched.steps_reported <= 110
        norm = merged(watched)[-1].grad_norm
        assert norm is not None and not isnan(norm)


class TestOneForEachParameter:
    """As of pyro, which makes an optimizer for each parameter right before its first step."""

    @staticmethod
    def train(layers: int, made: str) -> tuple[list[float], list[torch.Tensor]]:
        """Train some steps; return the norms, and the weights that came of it."""
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(layers)))
        optimizers: dict[torch.Tensor, Optimizer] = {}

        def optimizer_of(parameter: torch.Tensor) -> Optimizer:
            if parameter not in optimizers:
                optimizers[parameter] = torch.optim.Adam([parameter], lr=1e-3)
            return optimizers[parameter]

        norms = []
        for parameter in model.parameters() if made == "before" else ():
            optimizer_of(parameter)
        for seed in range(STEPS):
            (1e3 * make_loss(model, seed)).backward()
            norms.append(sqrt(sum_squares(model)))
            for parameter in model.parameters():
                optimizer_of(parameter).step()
                gradient_of(parameter).mul_(0.5)  # as one that clips them in its own step
            model.zero_grad()
        return norms, [parameter.detach() for parameter in model.parameters()]

    @pytest.mark.parametrize("made", ["before", "then"])
    def test_all_are_in_the_norm_of_every_step(self, watch, made):
        watched = watch(layer_interval=1, **ALL)
        norms, _ = self.train(4, made)
        steps = merged(watched)
        assert [step.sequence for step in steps] == list(range(1, STEPS + 1))
        assert [step.grad_norm for step in steps] == pytest.approx(norms, rel=1e-6)
        assert all(step.gradients_judged for step in steps)
        assert [len(step.optimizers) for step in steps] == [8] * STEPS
        assert watched.state().records_dropped == 0
        assert watched.state().probe_errors == 0

    @pytest.mark.parametrize("made", ["before", "then"])
    @pytest.mark.parametrize("layers", [5, 6])
    def test_the_norm_is_absent_where_some_are_not_measured(self, watch, made, layers):
        watched = watch(layer_interval=1, **ALL)
        self.train(layers, made)
        steps = merged(watched)
        assert [step.sequence for step in steps] == list(range(1, STEPS + 1))
        assert not any(step.gradients_judged for step in steps)
        for step in steps:
            assert len(step.optimizers) == 8
            assert all(own.judged for own in step.optimizers.values())
        assert watched.state().unsupported == (NORM_LEFT_OUT,)
        assert watched.state().records_dropped == 0
        assert watched.state().probe_errors == 0

    def test_weights_are_the_same_to_the_bit(self, watch):
        _, without = self.train(5, "then")
        watch(layer_interval=1, **ALL)
        _, found = self.train(5, "then")
        for before, after in zip(without, found, strict=True):
            assert torch.equal(before, after)

    @pytest.mark.parametrize("place", ["host", "device"])
    def test_of_nine_the_norm_is_absent(self, watch, place, request):
        device = request.getfixturevalue("device") if place == "device" else None
        watched, model = watch(), nn.Sequential(*(nn.Linear(4, 4) for _ in range(9)))
        optimizers: list[Optimizer] = [
            torch.optim.SGD(layer.parameters(), lr=1e-3) for layer in model
        ]
        for seed in range(STEPS):
            backward(model, optimizers, seed)
            for optimizer in optimizers:
                optimizer.step()
        if device is not None:
            device.run()
        steps = merged(watched)
        assert [step.gradients_judged for step in steps] == [False] * STEPS
        assert [len(step.optimizers) for step in steps] == [8] * STEPS
        assert watched.state().unsupported == (NORM_LEFT_OUT,)
        assert watched.state().records_dropped == 0
