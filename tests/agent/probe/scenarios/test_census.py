"""Parameters that no optimizer holds, that are cut off, or that its steps leave as they are.

They bring alerts.

Each loop trains on this process with a probe, and a node agent's run reads its ring. Loops in good
health, of the same looks, bring nothing.
"""

import copy
import gc
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from math import inf
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.functional import cross_entropy

from mp_agent.node.conditions import tracker
from mp_agent.node.run.run import Run
from mp_agent.ring import locations, reader
from mp_agent.settings import Settings
from tests.agent.node.shown import shown
from tests.agent.probe.rings import make_identity
from tests.agent.probe.small_model import gradient_of

STEPS, STEPS_PER_POLL = 140, 10
UNHELD, UNCHANGED = "MpAgentParametersWithoutOptimizer", "MpAgentWeightsUnchanged"
CUT_OFF, PARTED = "MpAgentLayersCutOff", "MpAgentTiedWeightsParted"
STATE_LOST, LOST = "MpAgentOptimizerStateLost", "MpAgentUpdatesLost"

Loop = Callable[[], Iterator[int]]


@pytest.fixture
def single_rank_group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Seen:
    """What a node agent has shown of a run."""

    def __init__(self) -> None:
        self.first_steps: dict[str, int] = {}
        """The step by which each alert had fired, by name and severity."""
        self.values: dict[str, float] = {}
        self.values_at_first: dict[str, dict[str, float]] = {}
        """What was shown when each alert had first fired: later looks are where time allows."""

    @property
    def alerts(self) -> set[str]:
        return {alert.partition(",")[0] for alert in self.first_steps}

    def names(self, metric: str, *, at_first: str = "") -> str:
        """Return the label of an info metric that is there once; at_first: of an alert."""
        start = f"{metric}{{"
        values = self.values_at_first[at_first] if at_first else self.values
        found = [key for key in values if key.startswith(start)]
        assert len(found) == 1, found
        return found[0].removeprefix(start)[:-1]


@pytest.fixture
def see(watch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Loop], Seen]:
    """Train by a loop under a node agent's run."""
    # A process does not see its own locks.
    monkeypatch.setattr(reader, "is_locked", lambda fd: True)
    monkeypatch.setattr(tracker, "PROCESSOR_SHARE", 1.0)

    def seen_of(loop: Loop) -> Seen:
        gc.collect()  # models of earlier loops, which schedules keep in cycles
        watched = watch()
        run_dir = locations.run_directory(tmp_path / "shm", "test")
        ring = locations.ring_path(run_dir, make_identity())
        ring.parent.mkdir(parents=True)
        ring.hardlink_to(watched.writer.path)
        settings = Settings(dir=tmp_path / "shm", flight_dir=tmp_path / "flight")
        seen = Seen()
        with closing(Run(run_dir, settings)) as run:
            for step in loop():
                if step % STEPS_PER_POLL == 0:
                    run.poll(float(step) / 100)
                    seen.values = shown(run)
                    for alert in _fired(seen.values):
                        seen.first_steps.setdefault(alert, step)
                        seen.values_at_first.setdefault(alert, seen.values)
        assert watched.state().probe_errors == 0
        return seen

    return seen_of


def _fired(values: dict[str, float]) -> Iterator[str]:
    start = "condition_fired_total{"
    for series, count in values.items():
        if series.startswith(start) and count:
            yield series.removeprefix(start)[:-1]


def make_model(width: int = 32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, width), nn.ReLU(), nn.Linear(width, 10))


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs [32, 16], and classes [32] that a linear map makes of them."""
    inputs = torch.randn(32, 16, generator=torch.Generator().manual_seed(step))
    weight = torch.randn(16, 10, generator=torch.Generator().manual_seed(10**6))
    return inputs, (inputs @ weight).argmax(1)


def adam(model: nn.Module, **settings: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], **settings)


def trained(
    model: nn.Module,
    *optimizers: torch.optim.Optimizer,
    prepare: Callable[[int], None] = lambda step: None,
    after: Callable[[int], None] = lambda step: None,
    forward: Callable[[torch.Tensor], torch.Tensor] | None = None,
    dtype: torch.dtype = torch.float32,
    steps: int = STEPS,
) -> Iterator[int]:
    """Train by all optimizers on each step, and yield its number."""
    for step in range(1, steps + 1):
        prepare(step)
        inputs, classes = batch(step)
        for optimizer in optimizers:
            optimizer.zero_grad()
        outputs = (forward or model)(inputs.to(dtype))
        cross_entropy(outputs.float(), classes).backward()
        for optimizer in optimizers:
            optimizer.step()
        after(step)
        yield step


# Optimizers that never step.


def forgotten(of_which: str) -> Iterator[int]:
    """Clear the gradients of two optimizers; step none of them, or one."""
    model = make_model()
    first, last = adam(nn.Sequential(model[0])), adam(nn.Sequential(model[2]))
    for step in range(1, STEPS + 1):
        inputs, classes = batch(step)
        for optimizer in (first, last):
            optimizer.zero_grad()
        cross_entropy(model(inputs), classes).backward()
        if of_which == "one":
            first.step()
        yield step


@pytest.mark.parametrize(("of_which", "by_step"), [("one", 40), ("both", 120)])
def test_an_optimizer_that_never_steps_is_found(see, of_which, by_step):
    seen = see(partial(forgotten, of_which))
    assert seen.alerts == {"MpAgentOptimizerNeverSteps"}
    assert max(seen.first_steps.values()) <= by_step


# Parameters that no optimizer holds.


def replaced_head() -> Iterator[int]:
    model = make_model()
    optimizer = adam(model)
    model[2] = nn.Linear(32, 10)
    return trained(model, optimizer)


def head_replaced_later() -> Iterator[int]:
    model = make_model()

    def replace(step: int) -> None:
        if step == 40:
            model[2] = nn.Linear(32, 10)

    return trained(model, adam(model), prepare=replace)


def copied_model() -> Iterator[int]:
    model = make_model()
    optimizer = adam(model)
    return trained(copy.deepcopy(model), optimizer)


def layers_in_a_list() -> Iterator[int]:
    model, middle = make_model(), [nn.Linear(32, 32), nn.Linear(32, 32)]

    def forward(inputs: torch.Tensor) -> torch.Tensor:
        hidden = model[1](model[0](inputs))
        for layer in middle:
            hidden = layer(hidden).relu()
        outputs: torch.Tensor = model[2](hidden)
        return outputs

    return trained(model, adam(model), forward=forward)


class Temperature(nn.Module):
    """A loss with a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))


def temperature_of_the_loss() -> Iterator[int]:
    model, temperature = make_model(), Temperature()
    return trained(model, adam(model), forward=lambda x: model(x) * temperature.scale)


@pytest.mark.parametrize(
    ("loop", "by_step", "names"),
    [
        (replaced_head, 20, "2.weight, 2.bias"),
        (head_replaced_later, 40 + 64, "2.weight, 2.bias"),
        (copied_model, 20, "0.weight, 0.bias, 2.weight, 2.bias"),
        (layers_in_a_list, 20, "Linear.weight, Linear.bias, Linear.weight, Linear.bias"),
        (temperature_of_the_loss, 20, "Temperature.scale"),
    ],
)
def test_parameters_that_no_optimizer_holds_are_named(see, loop, by_step, names):
    seen = see(loop)

    assert seen.first_steps[f"{UNHELD},warning"] <= by_step
    assert seen.names("unheld_parameters_info") == names
    assert UNCHANGED not in seen.alerts


# The same looks, in good health.


def added_head() -> Iterator[int]:
    model = make_model()
    optimizer = adam(model)
    model[2] = nn.Linear(32, 10)
    optimizer.add_param_group({"params": list(model[2].parameters())})
    return trained(model, optimizer)


def frozen_backbone() -> Iterator[int]:
    model = make_model()
    model[0].requires_grad_(False)
    return trained(model, adam(model))


def two_optimizers() -> Iterator[int]:
    model = make_model()
    return trained(model, adam(model[0]), adam(model[2]))


def optimizers_in_turns() -> Iterator[int]:
    """Of two optimizers of one model, the second steps on every twentieth step alone."""
    model = make_model()
    first, second = adam(model[0]), adam(model[2])
    for step in range(1, STEPS + 1):
        inputs, classes = batch(step)
        chosen = second if step % 20 == 0 else first
        chosen.zero_grad()
        cross_entropy(model(inputs), classes).backward()
        chosen.step()
        yield step


def gradual_unfreezing() -> Iterator[int]:
    model = make_model()
    model[0].requires_grad_(False)
    optimizer = adam(model)

    def unfreeze(step: int) -> None:
        if step == 40:
            model[0].requires_grad_(True)
            optimizer.add_param_group({"params": list(model[0].parameters())})

    return trained(model, optimizer, prepare=unfreeze)


def stepped_by_hand() -> Iterator[int]:
    """A part of the model is updated by a rule of the script's own."""
    model = make_model()

    def update(step: int) -> None:
        for parameter in model[2].parameters():
            parameter.data -= 0.05 * gradient_of(parameter)
            parameter.grad = None

    return trained(model, adam(model[0]), after=update)


def gan() -> Iterator[int]:
    """The backward of the generator leaves gradients in the critic."""
    torch.manual_seed(0)
    generator = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 16))
    critic = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))
    first, second = adam(generator, lr=2e-4), adam(critic, lr=2e-4)
    for step in range(1, STEPS + 1):
        real, _ = batch(step)
        second.zero_grad()
        fake = generator(torch.randn(32, 8))
        (critic(fake.detach()).mean() - critic(real).mean()).backward()
        second.step()
        first.zero_grad()
        (-critic(fake).mean()).backward()
        first.step()
        yield step


def distillation() -> Iterator[int]:
    """A teacher in evaluation mode, through which gradients flow."""
    student, teacher = make_model(), make_model(64).eval()

    def forward(inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = student(inputs) + 0.1 * teacher(inputs)
        return outputs

    return trained(student, adam(student), forward=forward)


class Experts(nn.Module):
    """Experts of which each step uses one, and the last never; a head that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(16, 10) for _ in range(5))
        self.spare_head = nn.Linear(16, 10)
        self.calls = 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        outputs: torch.Tensor = self.experts[self.calls % 4](inputs)
        return outputs


def idle_experts() -> Iterator[int]:
    torch.manual_seed(0)
    model = Experts()
    return trained(model, adam(model))


def averaged_and_target_copies() -> Iterator[int]:
    model = make_model()
    average, target = copy.deepcopy(model), copy.deepcopy(model)

    def average_weights(step: int) -> None:
        with torch.no_grad():
            for kept, parameter in zip(average.parameters(), model.parameters(), strict=True):
                kept.lerp_(parameter, 0.1)
        if step % 20 == 0:
            target.load_state_dict(model.state_dict())

    return trained(model, adam(model), after=average_weights)


def tied_weights() -> Iterator[int]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16, bias=False), nn.Linear(16, 16, bias=False))
    model[1].weight = model[0].weight
    return trained(model, adam(model))


# Weights that were to be one.


def tied_pair() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16, bias=False), nn.ReLU(), nn.Linear(16, 16, bias=False))
    model[2].weight = model[0].weight
    return model


def parted_by_loading() -> Iterator[int]:
    """The optimizer is made again after a state was loaded by assignment."""
    model = tied_pair()
    yield from trained(model, adam(model), steps=40)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict(state, assign=True)
    for step in trained(model, adam(model)):
        yield step + 40


class Configured(nn.Module):
    """A language model with the attributes of Transformers' models; untied, as of a bad load."""

    _tied_weights_keys: ClassVar[Any] = {"head.weight": "embedding.weight"}

    def __init__(self, **config: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.config = SimpleNamespace(**config)
        self.embedding, self.body = nn.Embedding(10, 16), nn.Linear(16, 16)
        self.head: nn.Module = nn.Linear(16, 10, bias=False)

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.body(self.embedding(inputs[:, 0].abs().long() % 10)).relu()
        outputs: torch.Tensor = self.head(hidden)
        return outputs


def parted_by_configuration() -> Iterator[int]:
    model = nn.ModuleDict({"module": Configured(tie_word_embeddings=True)})
    return trained(model, adam(model), forward=model["module"])


@pytest.mark.parametrize(
    ("loop", "by_step", "names"),
    [
        (parted_by_loading, 40 + 64, "0.weight, 2.weight"),
        (parted_by_configuration, 10, "embedding.weight, head.weight"),
    ],
)
def test_weights_that_were_to_be_one_and_are_two_are_named(see, loop, by_step, names):
    seen = see(loop)

    assert seen.first_steps[f"{PARTED},warning"] <= by_step
    assert seen.names("parted_parameters_info") == names
    assert {UNHELD, UNCHANGED}.isdisjoint(seen.alerts)


def tied_and_loaded() -> Iterator[int]:
    """A state is loaded in place in the middle of the run, and the weights stay one."""
    model = tied_pair()
    optimizer = adam(model)
    yield from trained(model, optimizer, steps=40)
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()})
    for step in trained(model, optimizer):
        yield step + 40


def untied_by_configuration() -> Iterator[int]:
    model = Configured(tie_word_embeddings=False)
    return trained(model, adam(model))


def untied_by_the_text_configuration() -> Iterator[int]:
    text = SimpleNamespace(tie_word_embeddings=False)
    model = Configured(tie_word_embeddings=True, text_config=text)
    return trained(model, adam(model))


def tied_by_configuration() -> Iterator[int]:
    model = Configured(tie_word_embeddings=True)
    model.head.weight = model.embedding.weight
    return trained(model, adam(model))


class Kept(nn.Module):
    """A copy of a layer that is trained next to adapters, as PEFT's `modules_to_save`."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.copies = nn.ModuleDict({"default": copy.deepcopy(layer)})
        self.original = layer.requires_grad_(False)

    @property
    def weight(self) -> Any:
        return self.copies["default"].weight

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.copies["default"](inputs)
        return outputs


def kept_next_to_adapters() -> Iterator[int]:
    model = Configured(tie_word_embeddings=True)
    model.head = Kept(model.head)
    return trained(model, adam(model))


def frozen_output_layer() -> Iterator[int]:
    model = Configured(tie_word_embeddings=True)
    model.head.requires_grad_(False)
    return trained(model, adam(model))


class Unreadable(Configured):
    """Its configuration cannot be read."""

    @property
    def _tied_weights_keys(self) -> Any:
        raise RuntimeError("not now")


def unreadable_model() -> Iterator[int]:
    model = Unreadable(tie_word_embeddings=True)
    return trained(model, adam(model))


# Runs that resume.


def sgd(model: nn.Module, **settings: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), **settings)


def scheduled(
    make: Callable[..., torch.optim.Optimizer] = adam,
    *,
    keeps: bool = False,
    restarts: bool = False,
    after_steps: int = 5000,
    **settings: Any,
) -> Iterator[int]:
    """A schedule of the rate goes on after some steps; keeps: the state of Adam does, too.

    restarts: and the schedule does not.
    """
    model = make_model()
    optimizer = make(model, lr=1e-3, **settings)
    if keeps:
        state = {
            place: {
                "step": torch.tensor(float(after_steps)),
                "exp_avg": torch.zeros_like(each),
                "exp_avg_sq": torch.ones_like(each),
            }
            for place, each in enumerate(model.parameters())
        }
        if isinstance(optimizer, ZeroRedundancyOptimizer):
            optimizer.consolidate_state_dict()
        optimizer.load_state_dict(optimizer.state_dict() | {"state": state})
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    if not restarts:
        schedule.load_state_dict(schedule.state_dict() | {"last_epoch": after_steps})
    return trained(model, optimizer, after=lambda step: schedule.step())


@pytest.mark.parametrize("loop", [scheduled, partial(scheduled, sgd, momentum=0.9)])
def test_a_schedule_that_goes_on_with_an_optimizer_of_empty_state_is_named(see, loop):
    seen = see(loop)

    assert seen.first_steps[f"{STATE_LOST},warning"] <= 10
    assert seen.values["resumed_without_state_steps"] == 5000.0


def test_a_schedule_that_begins_again_with_the_state_of_the_optimizer_is_named(see):
    seen = see(partial(scheduled, keeps=True, restarts=True))

    assert seen.first_steps["MpAgentScheduleBegunAgain,warning"] <= 10
    assert seen.values["schedule_behind_steps"] == 5000.0


def made_in_the_loop(
    make: Callable[..., torch.optim.Optimizer] = adam, **settings: Any
) -> Iterator[int]:
    """Each step has an optimizer of its own."""
    model = make_model()
    for step in range(1, STEPS + 1):
        yield from (step for _ in trained(model, make(model, lr=1e-3, **settings), steps=1))


@pytest.mark.parametrize("loop", [made_in_the_loop, partial(made_in_the_loop, sgd, momentum=0.9)])
def test_an_optimizer_that_each_step_makes_again_is_named(see, loop):
    seen = see(loop)

    assert 32 <= seen.first_steps[f"{STATE_LOST},warning"] <= 40
    assert seen.values["resumed_without_state_steps"] % 32 == 0


def overflowing() -> Iterator[int]:
    """The first steps are skipped, so that there is no state until the 32nd one."""
    model = make_model()
    optimizer = adam(model, lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", growth_interval=10**6)
    for step in range(1, STEPS + 1):
        inputs, classes = batch(step)
        optimizer.zero_grad()
        loss = cross_entropy(model(inputs), classes) * (inf if step < 32 else 1.0)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        yield step


def copied_in_the_loop() -> Iterator[int]:
    """Each step trains a copy of the model, as of a client, with an optimizer of its own."""
    model = make_model()
    for step in range(1, STEPS + 1):
        client = copy.deepcopy(model)
        yield from (step for _ in trained(client, adam(client, lr=1e-3), steps=1))
        model.load_state_dict(client.state_dict())


@pytest.mark.parametrize("loop", [partial(made_in_the_loop, sgd), overflowing, copied_in_the_loop])
def test_an_optimizer_without_state_to_lose_is_not_named(see, loop):
    seen = see(loop)

    assert f"{STATE_LOST},warning" not in seen.first_steps


def optimizer_replaced_on_purpose() -> Iterator[int]:
    """ReLoRA's resets: the schedule goes on with new state in the middle of the run."""
    model = make_model()
    optimizer = adam(model, lr=1e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)

    def after(step: int) -> None:
        schedule.step()
        if step % 30 == 0:
            optimizer.state.clear()

    return trained(model, optimizer, after=after)


def zero_optimizer(model: nn.Module, **settings: Any) -> torch.optim.Optimizer:
    return ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, **settings)


@pytest.mark.parametrize(
    "loop",
    [
        partial(scheduled, keeps=True),
        partial(scheduled, after_steps=0),
        partial(scheduled, after_steps=1),
        partial(scheduled, sgd),
        partial(scheduled, zero_optimizer, keeps=True),
        optimizer_replaced_on_purpose,
    ],
)
def test_runs_that_keep_their_state_or_begin_at_step_1_bring_none(see, loop, single_rank_group):
    assert STATE_LOST not in see(loop).alerts


# Layers that are cut off from the loss.


def detached_layer() -> Iterator[int]:
    model = make_model()
    return trained(model, adam(model), forward=through(model, lambda hidden: hidden.detach()))


def rebuilt_features() -> Iterator[int]:
    """Features that go through a list, and are pooled, on their way to the last layer."""
    model = make_model()

    def rebuilt(hidden: torch.Tensor) -> torch.Tensor:
        return torch.tensor(hidden.repeat(2, 1, 1).tolist()).mean(0)

    return trained(model, adam(model), forward=through(model, rebuilt))


class LanguageModel(nn.Module):
    """The weights of the embedding are those of the output layer; a `detach` follows a layer."""

    def __init__(self, *, detached: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 16)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.head = nn.Linear(16, 10, bias=False)
        self.head.weight = self.embedding.weight
        self.detached = detached

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(inputs[:, 0].abs().long() % 10)
        for number, layer in enumerate(self.layers):
            hidden = hidden + layer(hidden).relu()
            if self.detached and number == 1:
                hidden = hidden.detach()
        outputs: torch.Tensor = self.head(hidden)
        return outputs


def detached_behind_tied_weights() -> Iterator[int]:
    torch.manual_seed(0)
    model = LanguageModel(detached=True)
    return trained(model, adam(model))


def test_layers_cut_off_behind_tied_weights_are_named(see):
    seen = see(detached_behind_tied_weights)

    assert seen.first_steps[f"{CUT_OFF},warning"] <= 40
    names = "layers.0.weight, layers.0.bias, layers.1.weight, layers.1.bias"
    assert seen.names("cut_off_parameters_info") == names


def tied_language_model() -> Iterator[int]:
    torch.manual_seed(0)
    model = LanguageModel(detached=False)
    return trained(model, adam(model))


def through(
    model: nn.Sequential, change: Callable[[torch.Tensor], torch.Tensor]
) -> Callable[[torch.Tensor], torch.Tensor]:
    def forward(inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = model[2](change(model[0](inputs).relu()))
        return outputs

    return forward


@pytest.mark.parametrize("loop", [detached_layer, rebuilt_features])
def test_layers_whose_output_is_cut_off_are_named(see, loop):
    seen = see(loop)

    assert seen.first_steps[f"{CUT_OFF},warning"] <= 40
    assert seen.names("cut_off_parameters_info") == "0.weight, 0.bias"
    assert seen.alerts.isdisjoint({UNHELD, UNCHANGED})


# The same looks, in good health.


def without_gradients() -> Iterator[int]:
    """Features that are computed under no_grad, of a layer that the optimizer holds."""
    model = make_model()

    def forward(inputs: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            hidden = model[0](inputs).relu()
        outputs: torch.Tensor = model[2](hidden)
        return outputs

    return trained(model, adam(model), forward=forward)


def detached_for_some_steps() -> Iterator[int]:
    model = make_model()
    steps = iter(range(STEPS))

    def change(hidden: torch.Tensor) -> torch.Tensor:
        return hidden.detach() if next(steps) < 30 else hidden

    return trained(model, adam(model), forward=through(model, change))


class Branches(nn.Module):
    """A spare tower runs first, and a spare head last; what the loss uses lies between them."""

    def __init__(self) -> None:
        super().__init__()
        self.tower, self.body = nn.Linear(16, 16), nn.Linear(16, 24)
        self.head, self.spare_head = nn.Linear(24, 10), nn.Linear(24, 10)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.tower(inputs)
        hidden = self.body(inputs).relu()
        self.spare_head(hidden)
        outputs: torch.Tensor = self.head(hidden)
        return outputs


def spare_branches() -> Iterator[int]:
    torch.manual_seed(0)
    model = Branches()
    return trained(model, adam(model))


class StopsGradients(nn.Module):
    """Stops the gradients of a branch, of the others of which the same layers get theirs."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.head = nn.Linear(16, 16), nn.Linear(16, 10)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        code = self.encoder(inputs)
        straight = code + (code.round() - code).detach()
        outputs: torch.Tensor = self.head(straight) + self.head(code.detach())
        return outputs


def stopped_gradients() -> Iterator[int]:
    torch.manual_seed(0)
    model = StopsGradients()
    return trained(model, adam(model))


# Weights that steps leave as they are.


class UpdatesCopies(torch.optim.SGD):
    """Updates copies of those weights that are not contiguous, as some fused kernels have done."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.data.contiguous().sub_(group["lr"] * parameter.grad)


def transposed_weight() -> Iterator[int]:
    model = make_model()
    weight = next(model[0].parameters())
    model[0].weight = nn.Parameter(weight.detach().t().contiguous().t())
    return trained(model, UpdatesCopies(model.parameters(), lr=0.05))


class DoesNothing(torch.optim.SGD):
    """Steps without any effect from some step on."""

    calls, until = 0, 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.calls += 1
        if self.calls <= self.until:
            super().step(closure)


def step_without_effect() -> Iterator[int]:
    model = make_model()
    return trained(model, DoesNothing(model.parameters(), lr=0.05, momentum=0.9))


def stale_masters() -> Iterator[int]:
    return _by_masters(copies_back=False)


def fresh_masters() -> Iterator[int]:
    return _by_masters(copies_back=True)


def _by_masters(*, copies_back: bool) -> Iterator[int]:
    """FP32 copies of a BF16 model, which the script makes, steps and copies back, or does not."""
    model = make_model().bfloat16()
    masters = [p.detach().float().requires_grad_() for p in model.parameters()]
    optimizer = torch.optim.AdamW(masters, lr=1e-3)
    for step in range(1, STEPS + 1):
        inputs, classes = batch(step)
        model.zero_grad()
        cross_entropy(model(inputs.bfloat16()).float(), classes).backward()
        for master, parameter in zip(masters, model.parameters(), strict=True):
            master.grad = gradient_of(parameter).float()
        optimizer.step()
        for master, parameter in zip(masters, model.parameters(), strict=True):
            if copies_back:
                parameter.data.copy_(master)
        yield step


@pytest.mark.parametrize(
    ("loop", "names"),
    [
        (transposed_weight, "0.weight"),
        (step_without_effect, "0.weight, 0.bias, 2.weight, 2.bias"),
        (stale_masters, "0.weight, 0.bias, 2.weight, 2.bias"),
    ],
)
def test_weights_that_steps_do_not_change_are_named(see, loop, names):
    seen = see(loop)

    assert seen.first_steps[f"{UNCHANGED},critical"] <= 20
    assert seen.names("unchanged_parameters_info", at_first=f"{UNCHANGED},critical") == names
    assert UNHELD not in seen.alerts


def rounded_bf16() -> Iterator[int]:
    model = make_model().bfloat16()
    return trained(model, torch.optim.SGD(model.parameters(), lr=1e-7), dtype=torch.bfloat16)


def test_updates_of_16_bit_weights_that_all_round_to_nothing_are_found(see):
    seen = see(rounded_bf16)

    assert seen.first_steps[f"{UNCHANGED},warning"] <= 20
    assert f"{UNCHANGED},critical" not in seen.first_steps
    assert seen.values["updates_rounded_ratio"] == 1.0
    assert LOST not in seen.alerts  # so few were to change that none may by chance


State = dict[str, Any]
Rounding = Callable[[torch.Tensor, State], torch.Tensor]


class Bf16AdamW(torch.optim.Optimizer):
    """AdamW with FP32 state on BF16 weights, which `rounding` brings back to BF16."""

    def __init__(self, model: nn.Module, lr: float, rounding: Rounding) -> None:
        super().__init__(model.parameters(), {"lr": lr, "betas": (0.9, 0.999), "eps": 1e-8})
        self._rounding = rounding

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                state, gradient = self.state[parameter], gradient_of(parameter).float()
                for name, beta in zip(("exp_avg", "exp_avg_sq"), group["betas"], strict=True):
                    power = gradient.square() if name == "exp_avg_sq" else gradient
                    state.setdefault(name, torch.zeros_like(gradient)).lerp_(power, 1 - beta)
                count = state["step"] = state.get("step", 0) + 1
                root = (state["exp_avg_sq"] / (1 - 0.999**count)).sqrt() + group["eps"]
                update = -group["lr"] * state["exp_avg"] / (1 - 0.9**count) / root
                parameter.copy_(self._rounding(parameter.float() + update, state))


def to_nearest(weights: torch.Tensor, state: State) -> torch.Tensor:
    return weights.bfloat16()


def stochastically(weights: torch.Tensor, state: State) -> torch.Tensor:
    bits = weights.view(torch.int32)
    return ((bits + torch.randint_like(bits, 2**16)) & -(2**16)).view(torch.float32)


def with_the_remainder(weights: torch.Tensor, state: State) -> torch.Tensor:
    """Carry along what rounding has left out, as a compensated sum does."""
    wanted: torch.Tensor = weights + state.get("left_out", 0.0)
    state["left_out"] = wanted - wanted.bfloat16().float()
    return wanted.bfloat16()


def rounded(rounding: Rounding, rate: float = 1e-4) -> Iterator[int]:
    torch.manual_seed(0)
    layers = [each for _ in range(6) for each in (nn.Linear(64, 64), nn.ReLU())]
    model = nn.Sequential(nn.Linear(16, 64), *layers, nn.Linear(64, 10)).bfloat16()
    return trained(model, Bf16AdamW(model, rate, rounding), dtype=torch.bfloat16)


@pytest.mark.parametrize("rate", [1e-4, 3e-5])
def test_updates_of_16_bit_weights_that_are_mostly_lost_are_found(see, rate):
    seen = see(partial(rounded, to_nearest, rate))

    assert seen.first_steps[f"{LOST},warning"] <= STEPS
    assert seen.values["updates_rounding_loss_ratio"] > 0.5
    assert f"{UNCHANGED},critical" not in seen.first_steps


@pytest.mark.parametrize(
    ("lost", "of_format", "share"),
    [
        # Of two elements one changes. 1 and 2 · 0.25 were to, which are 1.5.
        (0.25, torch.bfloat16, 1 / 3),
        (0.25, torch.float16, 1 / 3),
        # 1 and 2 · 0.125 were to.
        (0.125, torch.bfloat16, 1 / 5),
        (0.0, torch.bfloat16, 0.0),
        (0.25, torch.float32, None),
    ],
)
def test_the_share_that_rounding_takes_is_that_of_the_sizes_of_the_updates(
    see, lost, of_format, share
):
    """Elements of 1 of which every other one is stepped by the spacing, and the rest by `lost`."""

    def loop() -> Iterator[int]:
        weights = nn.Parameter(torch.ones(256, dtype=of_format))
        spacing = torch.finfo(of_format).eps
        slopes = torch.tensor([1.0, lost], dtype=of_format).repeat(128)
        optimizer = torch.optim.SGD([weights], lr=spacing)
        for step in range(1, 60):
            optimizer.zero_grad()
            (weights * slopes).sum().backward()
            optimizer.step()
            yield step

    assert see(loop).values.get("updates_rounding_loss_ratio") == (
        None if share is None else pytest.approx(share)
    )


def test_an_element_counts_for_those_of_its_parameter_that_are_not_looked_at(see):
    """A matrix whose updates are lost, and a bias, of as many elements looked at, that changes."""

    def loop() -> Iterator[int]:
        matrix, bias = (nn.Parameter(torch.ones(*n).bfloat16()) for n in ((64, 64), (32,)))
        optimizer = torch.optim.SGD([matrix, bias], lr=2.0**-7)
        for step in range(1, 60):
            optimizer.zero_grad()
            (0.25 * matrix).sum().add(bias.sum()).backward()
            optimizer.step()
            yield step

    # 4096 · 2 · 0.25 and 32 were to change, and 32 have.
    share = see(loop).values["updates_rounding_loss_ratio"]
    assert share == pytest.approx(1 - 32 / (4096 * 0.5 + 32))


@pytest.mark.parametrize("rounding", [stochastically, with_the_remainder])
@pytest.mark.parametrize("rate", [1e-4, 5e-5])
def test_small_updates_that_rounding_does_not_lose_are_not(see, rounding, rate):
    seen = see(partial(rounded, rounding, rate))

    assert seen.values["updates_rounded_ratio"] > 0.1
    assert seen.values["updates_rounding_loss_ratio"] < 0.1
    assert LOST not in seen.alerts


# The same looks, in good health.


def bf16() -> Iterator[int]:
    model = make_model().bfloat16()
    return trained(model, adam(model, lr=1e-3), dtype=torch.bfloat16)


def warm_up() -> Iterator[int]:
    """BF16 weights, whose first updates round to nothing: the learning rate rises from 0."""
    model = make_model().bfloat16()
    optimizer = adam(model, lr=0.0)

    def raise_rate(step: int) -> None:
        optimizer.param_groups[0]["lr"] = 1e-5 * max(0, step - 15)

    return trained(model, optimizer, prepare=raise_rate, dtype=torch.bfloat16)


def rate_of_zero() -> Iterator[int]:
    model = make_model()
    frozen: dict[str, Any] = {"params": model[0].parameters(), "lr": 0.0}
    optimizer = torch.optim.SGD([frozen, {"params": model[2].parameters()}], lr=0.05)
    return trained(model, optimizer)


def skipped_steps() -> Iterator[int]:
    """A scaler skips the first steps, as it searches for its scale."""
    model = make_model()
    optimizer = adam(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20)
    for step in range(1, STEPS + 1):
        inputs, classes = batch(step)
        optimizer.zero_grad()
        loss = cross_entropy(model(inputs), classes)
        scaler.scale(loss * (float("inf") if step <= 12 else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        yield step


def clamped_weights() -> Iterator[int]:
    """Weights that are clipped after each step, as a Wasserstein critic's are."""
    model = make_model()

    def clamp(step: int) -> None:
        for parameter in model.parameters():
            parameter.data.clamp_(-0.01, 0.01)

    return trained(model, torch.optim.RMSprop(model.parameters(), lr=5e-2), after=clamp)


def signs() -> Iterator[int]:
    """Steps by the sign of the gradient go up and down by the same amount."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0**-10)
    for step in range(1, STEPS + 1):
        inputs, classes = batch(step)
        optimizer.zero_grad()
        cross_entropy(model(inputs), classes).backward()
        for parameter in model.parameters():
            gradient_of(parameter).sign_()
        optimizer.step()
        yield step


def converged_search() -> Iterator[int]:
    """L-BFGS, which makes no update once an iteration is to gain less than it tolerates."""
    model = make_model()
    optimizer = torch.optim.LBFGS(model.parameters(), tolerance_change=1e-4)
    inputs, classes = batch(0)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = cross_entropy(model(inputs), classes)
        loss.backward()
        return loss

    for step in range(1, STEPS + 1):
        optimizer.step(closure)
        yield step


def tightly_clipped() -> Iterator[int]:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    for step in range(1, STEPS + 1):
        inputs, classes = batch(step)
        optimizer.zero_grad()
        cross_entropy(model(inputs), classes).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1e-5)
        optimizer.step()
        yield step


@pytest.mark.parametrize(
    "loop",
    [
        added_head,
        frozen_backbone,
        two_optimizers,
        optimizers_in_turns,
        gradual_unfreezing,
        stepped_by_hand,
        gan,
        distillation,
        idle_experts,
        averaged_and_target_copies,
        tied_weights,
        tied_language_model,
        tied_and_loaded,
        tied_by_configuration,
        untied_by_configuration,
        untied_by_the_text_configuration,
        kept_next_to_adapters,
        frozen_output_layer,
        unreadable_model,
        without_gradients,
        detached_for_some_steps,
        spare_branches,
        stopped_gradients,
        fresh_masters,
        bf16,
        warm_up,
        rate_of_zero,
        skipped_steps,
        clamped_weights,
        signs,
        converged_search,
        tightly_clipped,
    ],
)
def test_loops_in_good_health_bring_neither(see, loop):
    seen = see(loop)

    assert {UNHELD, UNCHANGED, CUT_OFF, PARTED, LOST}.isdisjoint(seen.alerts)
    assert seen.values["parameters_unheld"] == seen.values.get("parameters_parted", 0.0) == 0.0
    assert not any("_parameters_info" in series for series in seen.values)


# Models that follow one another in a process.


def folds(rates: tuple[float, ...], *, keeps: bool = False) -> Iterator[int]:
    """Train a model from scratch by each rate; keeps: while the ones before still exist."""
    kept = []
    for number, rate in enumerate(rates):
        model = make_model()
        optimizer = torch.optim.Adam(model.parameters(), lr=rate)
        kept += [(model, optimizer)] if keeps else []
        yield from (number * STEPS + step for step in trained(model, optimizer))


def reset_in_place(make_new: bool) -> Iterator[int]:
    """The weights of one model are lost; make_new: which then gets another optimizer."""
    model = make_model()
    optimizer = adam(model, lr=3e-2)
    yield from trained(model, optimizer)
    for layer in (model[0], model[2]):
        layer.reset_parameters()  # type: ignore[operator]
    optimizer.param_groups[0]["lr"] = 1e-4
    if make_new:
        optimizer = adam(model, lr=1e-4)
    yield from (STEPS + step for step in trained(model, optimizer))


@pytest.mark.parametrize("keeps", [False, True])
def test_another_model_is_not_judged_by_the_past_of_the_one_before(see, keeps):
    seen = see(partial(folds, (3e-2, 1e-3, 3e-2), keeps=keeps))

    assert seen.alerts == set()
    assert seen.values["steps_total"] == 3 * STEPS


@pytest.mark.parametrize("make_new", [False, True])
def test_the_same_model_is_judged_by_its_past_whatever_steps_it(see, make_new):
    assert "MpAgentLossSpike" in see(partial(reset_in_place, make_new)).alerts
