# ruff: noqa: D401 - a docstring is the row of the table, and says what is wrong
"""Small trainings with a silent error: `torchrun trainings.py NAME ...`, each as a separate run.

Two ranks classify the sums of their inputs on the CPU, with the probe as a user attaches it. Each
function trains with the error, or with `wrong=False` its healthy twin, `NAME/healthy`; the probe is
not given which.
"""

import copy
import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import mp_agent

FEATURES, CLASSES, BATCH_SIZE, WIDTH = 16, 4, 32, 32
ONSET_STEP = 100
"""The first step with the error, of trainings that begin healthy."""
STEPS = 200
_STEP_SECONDS = 0.02


@dataclass(frozen=True, slots=True)
class SilentError:
    """An error: since which step it is there, and in which group of the table it stands."""

    train: Callable[[bool], None]
    group: str
    onset: int

    @property
    def name(self) -> str:
        """Its name on the command line."""
        return self.train.__name__.replace("_", "-")

    @property
    def text(self) -> str:
        """What is wrong, in a sentence."""
        return (self.train.__doc__ or "").strip()


ERRORS: dict[str, SilentError] = {}


def _error(
    group: str, onset: int = 1
) -> Callable[[Callable[[bool], None]], Callable[[bool], None]]:
    def add(train: Callable[[bool], None]) -> Callable[[bool], None]:
        found = SilentError(train, group, onset)
        ERRORS[found.name] = found
        return train

    return add


def _steps(count: int = STEPS) -> Iterator[int]:
    """Yield the number of each step, from 1 on; a step takes some time."""
    for step in range(1, count + 1):
        yield step
        time.sleep(_STEP_SECONDS)


def _model(*, dropout: float = 0.0, normalized: bool = False) -> nn.Sequential:
    layers: list[nn.Module] = [nn.Linear(FEATURES, WIDTH)]
    if normalized:
        layers.append(nn.BatchNorm1d(WIDTH))
    layers += [nn.GELU(), nn.Dropout(dropout), nn.Linear(WIDTH, WIDTH), nn.GELU()]
    return nn.Sequential(*layers, nn.Linear(WIDTH, CLASSES))


_CHANCE = torch.Generator()


def _batch(size: int = BATCH_SIZE) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs [size, FEATURES], and classes [size] that follow from them."""
    inputs = torch.randn(size, FEATURES, generator=_CHANCE)
    return inputs, (inputs[:, :CLASSES] + 0.1 * inputs[:, CLASSES : 2 * CLASSES]).argmax(1)


def _loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor] | None = None) -> torch.Tensor:
    inputs, classes = batch or _batch()
    return functional.cross_entropy(model(inputs), classes)


def _replicas(
    model: nn.Module | None = None, *, find_unused: bool = False
) -> DistributedDataParallel:
    return DistributedDataParallel(model or _model(), find_unused_parameters=find_unused)


def _sgd(model: nn.Module, rate: float = 0.05) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)


def _update(optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> None:
    optimizer.zero_grad()
    torch.autograd.backward(loss)
    optimizer.step()


@_error("loop")
def gradients_never_cleared(wrong: bool) -> None:
    """`zero_grad` is never called."""
    model = _replicas()
    optimizer = _sgd(model, 0.005)
    for _ in _steps():
        if not wrong:
            optimizer.zero_grad()
        torch.autograd.backward(_loss(model))
        optimizer.step()


@_error("loop", ONSET_STEP)
def micro_batches_cleared(wrong: bool) -> None:
    """`zero_grad` is called before each of four micro-batches, so that three are lost."""
    model = _replicas()
    optimizer = _sgd(model)
    for step in _steps(160):
        optimizer.zero_grad()
        for _ in range(4):
            if wrong and step >= ONSET_STEP:
                optimizer.zero_grad()
            torch.autograd.backward(_loss(model) / 4)
        optimizer.step()


@_error("loop")
def clipped_after_the_step(wrong: bool) -> None:
    """Gradients are clipped after the step that used them."""
    model = _replicas()
    optimizer = _sgd(model)
    for _ in _steps():
        optimizer.zero_grad()
        torch.autograd.backward(_loss(model))
        if wrong:
            optimizer.step()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        if not wrong:
            optimizer.step()


@_error("loop")
def stepped_before_backward(wrong: bool) -> None:
    """The step comes between `zero_grad` and backward: it never sees a gradient."""
    model = _replicas()
    optimizer = _sgd(model)
    for _ in _steps():
        optimizer.zero_grad()
        if wrong:
            optimizer.step()
        torch.autograd.backward(_loss(model))
        if not wrong:
            optimizer.step()


@_error("loop", 2)
def schedule_per_batch(wrong: bool) -> None:
    """A schedule made for epochs is stepped at every batch: the rate is soon nothing."""
    model = _replicas()
    optimizer = _sgd(model)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    for step in _steps():
        _update(optimizer, _loss(model))
        if wrong or step % 100 == 0:
            schedule.step()


@_error("loop")
def rate_divided_by_integers(wrong: bool) -> None:
    """A schedule divides integers, and its factor is 0 until the warm-up ends."""
    model = _replicas()
    optimizer = _sgd(model)

    def factor(step: int) -> float:
        return min(1, step // 1000) if wrong else min(1.0, (step + 1) / 100)

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    for _ in _steps():
        _update(optimizer, _loss(model))
        schedule.step()


@_error("loop")
def clipped_before_unscaling(wrong: bool) -> None:
    """Gradients are clipped while they are still multiplied by the loss scale."""
    model = _replicas()
    optimizer = _sgd(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for _ in _steps():
        optimizer.zero_grad()
        torch.autograd.backward(scaler.scale(_loss(model)))
        if not wrong:
            scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()


@_error("loop")
def stepped_twice(wrong: bool) -> None:
    """The optimizer steps twice with the same gradients."""
    model = _replicas()
    optimizer = _sgd(model, 0.02)
    for _ in _steps():
        _update(optimizer, _loss(model))
        if wrong:
            optimizer.step()


@_error("modes", ONSET_STEP)
def evaluation_mode_kept(wrong: bool) -> None:
    """After a validation `train()` is not called: no dropout, running statistics."""
    model = _replicas(_model(dropout=0.2, normalized=True))
    optimizer = _sgd(model)
    for step in _steps():
        if step == ONSET_STEP:
            model.eval()
            with torch.no_grad():
                _loss(model)
            if not wrong:
                model.train()  # type: ignore[no-untyped-call]
        _update(optimizer, _loss(model))


@_error("modes")
def model_outside_of_autocast(wrong: bool) -> None:
    """BF16 is asked for, but the model is called in a context that switches autocast off."""
    model = _replicas()
    optimizer = _sgd(model)
    for _ in _steps():
        inputs, classes = _batch()
        with torch.autocast("cpu", torch.bfloat16):
            with torch.autocast("cpu", enabled=False) if wrong else nullcontext():
                logits = model(inputs)
            loss = functional.cross_entropy(logits, classes)
        _update(optimizer, loss)


@_error("modes")
def dropout_doubled(wrong: bool) -> None:
    """Dropout of 0.6 where 0.3 was meant."""
    model = _replicas(_model(dropout=0.6 if wrong else 0.3))
    optimizer = _sgd(model)
    for _ in _steps():
        _update(optimizer, _loss(model))


@_error("optimizer")
def head_replaced_after_the_optimizer(wrong: bool) -> None:
    """The optimizer is made before the last layer is replaced."""
    model = _model()
    optimizer = _sgd(model)
    model[-1] = nn.Linear(WIDTH, CLASSES)
    if not wrong:
        optimizer = _sgd(model)
    replicas = _replicas(model)
    for _ in _steps():
        _update(optimizer, _loss(replicas))


@_error("optimizer")
def optimizer_of_a_copy(wrong: bool) -> None:
    """The optimizer holds the parameters of the model that a copy was made of."""
    model = _model()
    trained = copy.deepcopy(model)
    optimizer = _sgd(model if wrong else trained)
    replicas = _replicas(trained)
    for _ in _steps():
        optimizer.zero_grad()
        replicas.zero_grad()
        torch.autograd.backward(_loss(replicas))
        optimizer.step()


@_error("optimizer")
def layer_detached(wrong: bool) -> None:
    """`detach` in the forward pass cuts the first layers off."""
    model = _replicas(_Detached(wrong), find_unused=True)
    optimizer = _sgd(model)
    for _ in _steps():
        _update(optimizer, _loss(model))


class _Detached(nn.Module):
    def __init__(self, detached: bool) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.detached = detached

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = functional.gelu(self.first(inputs))
        logits: torch.Tensor = self.last(hidden.detach() if self.detached else hidden)
        return logits


@_error("optimizer", ONSET_STEP)
def layer_detached_later(wrong: bool) -> None:
    """From some step on a `detach` cuts the first layers off."""
    layers = _Detached(detached=False)
    model = _replicas(layers, find_unused=True)
    optimizer = _sgd(model)
    for step in _steps():
        layers.detached = wrong and step >= ONSET_STEP
        _update(optimizer, _loss(model))


@_error("optimizer", ONSET_STEP)
def layer_replaced_later(wrong: bool) -> None:
    """From some step on the model has a new last layer, which no optimizer holds."""
    model = _model()
    replicas, optimizer = _replicas(model), _sgd(model)
    for step in _steps():
        if step == ONSET_STEP:
            model[-1] = nn.Linear(WIDTH, CLASSES)
            replicas = _replicas(model)
            optimizer = optimizer if wrong else _sgd(model)
        optimizer.zero_grad()
        replicas.zero_grad()
        torch.autograd.backward(_loss(replicas))
        optimizer.step()


@_error("optimizer")
def layer_frozen(wrong: bool) -> None:
    """A layer that was to be trained has `requires_grad=False`."""
    model = _model()
    if wrong:
        model[0].requires_grad_(False)
    replicas = _replicas(model)
    optimizer = _sgd(replicas)
    for _ in _steps():
        _update(optimizer, _loss(replicas))


class _Forgetful(torch.optim.SGD):
    """Its step changes copies of the parameters."""

    wrong = True

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        """Change nothing if it is wrong."""
        held = [(p, p.detach().clone()) for group in self.param_groups for p in group["params"]]
        super().step()
        with torch.no_grad():
            for parameter, before in held if self.wrong else ():
                parameter.copy_(before)


@_error("optimizer", ONSET_STEP)
def update_lost(wrong: bool) -> None:
    """From some step on the update goes to a copy of the weights."""
    model = _replicas()
    optimizer = _Forgetful(model.parameters(), lr=0.05)
    for step in _steps():
        optimizer.wrong = wrong and step >= ONSET_STEP
        _update(optimizer, _loss(model))


@_error("optimizer")
def update_below_the_format(wrong: bool) -> None:
    """BF16 weights without masters, at a learning rate below their spacing."""
    model = _replicas(_model().to(torch.bfloat16))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-7 if wrong else 0.5)
    for _ in _steps():
        inputs, classes = _batch()
        logits = model(inputs.to(torch.bfloat16)).float()
        _update(optimizer, functional.cross_entropy(logits, classes))


@_error("optimizer")
def adam_state_in_fp16(wrong: bool) -> None:
    """Adam on FP16 weights with an epsilon that FP16 rounds to 0."""
    model = _replicas(_model().half())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, eps=1e-8 if wrong else 1e-4)
    for _ in _steps():
        inputs, classes = _batch()
        _update(optimizer, functional.cross_entropy(model(inputs.half()).float(), classes))


@_error("ranks")
def wrapper_bypassed(wrong: bool) -> None:
    """`model.module` is called, so that nothing reduces the gradients."""
    model = _replicas()
    optimizer = _sgd(model)
    for _ in _steps():
        _update(optimizer, _loss(model.module if wrong else model))


@_error("ranks", ONSET_STEP)
def no_sync_never_left(wrong: bool) -> None:
    """From some step on every backward is in `no_sync`."""
    model = _replicas()
    optimizer = _sgd(model)
    for step in _steps():
        with model.no_sync() if wrong and step >= ONSET_STEP else nullcontext():
            _update(optimizer, _loss(model))


@_error("ranks")
def parameter_that_ddp_ignores(wrong: bool) -> None:
    """DDP ignores a layer that is trained."""
    model = _model()
    if wrong:
        names = [name for name, _ in model.named_parameters() if name.startswith("3.")]
        # What torch reads; its own function for it is private.
        model._ddp_params_and_buffers_to_ignore = names  # type: ignore[assignment]
    replicas = _replicas(model)
    optimizer = _sgd(replicas)
    for _ in _steps():
        _update(optimizer, _loss(replicas))


@_error("ranks")
def layer_missing_in_a_reduction_by_hand(wrong: bool) -> None:
    """Gradients are averaged by hand, and the last layer is forgotten."""
    torch.manual_seed(0)
    model = _model()
    optimizer = _sgd(model)
    parameters = list(model.parameters())
    for _ in _steps():
        optimizer.zero_grad()
        torch.autograd.backward(_loss(model))
        for parameter in parameters[:-2] if wrong else parameters:
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad)
            parameter.grad.div_(dist.get_world_size())
        optimizer.step()


@_error("ranks", ONSET_STEP)
def rate_of_one_rank(wrong: bool) -> None:
    """The schedule of rank 1 follows its own losses."""
    model = _replicas()
    optimizer = _sgd(model)
    for step in _steps():
        if wrong and step == ONSET_STEP and dist.get_rank() == 1:
            optimizer.param_groups[0]["lr"] *= 0.1
        _update(optimizer, _loss(model))


@_error("ranks", ONSET_STEP)
def clipped_on_one_rank(wrong: bool) -> None:
    """Only rank 1 clips its gradients after their reduction, as BLOOM's layer norms were."""
    model = _replicas()
    optimizer = _sgd(model)
    for step in _steps():
        optimizer.zero_grad()
        torch.autograd.backward(_loss(model))
        if not wrong or (step >= ONSET_STEP and dist.get_rank() == 1):
            nn.utils.clip_grad_norm_(model.parameters(), 0.05 if wrong else 1e6)
        optimizer.step()


@_error("ranks", ONSET_STEP)
def decay_of_one_rank(wrong: bool) -> None:
    """Rank 1 resumes with another weight decay."""
    model = _replicas()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    for step in _steps():
        if wrong and step == ONSET_STEP and dist.get_rank() == 1:
            optimizer.param_groups[0]["weight_decay"] = 0.1
        _update(optimizer, _loss(model))


@_error("ranks", ONSET_STEP)
def step_skipped_on_one_rank(wrong: bool) -> None:
    """Rank 1 leaves out every tenth step, for its own loss."""
    model = _replicas()
    optimizer = _sgd(model)
    for step in _steps():
        optimizer.zero_grad()
        torch.autograd.backward(_loss(model))
        skips = wrong and step >= ONSET_STEP and step % 10 == 0 and dist.get_rank() == 1
        if skips:
            optimizer.zero_grad()
        optimizer.step()


@_error("ranks")
def other_seed_on_each_rank(wrong: bool) -> None:
    """Gradients are averaged by hand, of weights that no one has made equal."""
    torch.manual_seed(dist.get_rank() if wrong else 0)
    model = _model()
    optimizer = _sgd(model)
    for _ in _steps():
        optimizer.zero_grad()
        torch.autograd.backward(_loss(model))
        _average(model)
        optimizer.step()


def _average(model: nn.Module) -> None:
    for parameter in model.parameters():
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad)
        parameter.grad.div_(dist.get_world_size())


@_error("ranks", ONSET_STEP)
def norms_clipped_on_one_tensor_rank(wrong: bool) -> None:
    """Of tensor parallelism by hand, one rank alone clips the norms that both hold, as BLOOM's."""
    torch.manual_seed(0)
    norm = nn.LayerNorm(FEATURES)
    torch.manual_seed(1 + dist.get_rank())
    part = nn.Sequential(
        nn.Linear(FEATURES, WIDTH // 2), nn.GELU(), nn.Linear(WIDTH // 2, CLASSES, bias=False)
    )
    model = nn.ModuleDict({"norm": norm, "part": part})
    optimizer = _sgd(model)
    _CHANCE.manual_seed(1)
    for step in _steps():
        inputs, classes = _batch()
        own = part(norm(inputs))
        whole = own.detach().clone()
        dist.all_reduce(whole)
        optimizer.zero_grad()
        # What the other rank adds is a constant for this one.
        torch.autograd.backward(functional.cross_entropy(own + (whole - own.detach()), classes))
        for parameter in norm.parameters():
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad)
        if wrong and step >= ONSET_STEP and dist.get_rank() == 1:
            nn.utils.clip_grad_norm_(norm.parameters(), 1e-3)
        optimizer.step()


def _data_set(seed: int = 0) -> TensorDataset:
    _CHANCE.manual_seed(seed)
    return TensorDataset(*_batch(40 * BATCH_SIZE))


def _endless(loader: DataLoader[tuple[torch.Tensor, ...]]) -> Iterator[list[torch.Tensor]]:
    while True:
        yield from loader


@_error("data")
def no_distributed_sampler(wrong: bool) -> None:
    """Every rank reads the whole data set in the same order."""
    model = _replicas()
    optimizer = _sgd(model)
    data = _data_set()
    torch.manual_seed(0)
    sampler: DistributedSampler[tuple[torch.Tensor, ...]] | None = None
    if not wrong:
        sampler = DistributedSampler(data)
    loader = DataLoader(data, BATCH_SIZE, shuffle=wrong, sampler=sampler)
    batches = _endless(loader)
    for _ in _steps():
        inputs, classes = next(batches)
        _update(optimizer, _loss(model, (inputs, classes)))


@_error("data")
def first_batch_again(wrong: bool) -> None:
    """`next(iter(loader))` in the loop gives the first batch for ever."""
    model = _replicas()
    optimizer = _sgd(model)
    data = _data_set(dist.get_rank())
    loader = DataLoader(data, BATCH_SIZE)
    batches = _endless(loader)
    for _ in _steps():
        inputs, classes = next(iter(loader)) if wrong else next(batches)
        _update(optimizer, _loss(model, (inputs, classes)))


@_error("data", ONSET_STEP)
def one_sample_on_one_rank(wrong: bool) -> None:
    """From some step on the batches of rank 1 have one sample."""
    model = _replicas()
    optimizer = _sgd(model)
    for step in _steps():
        alone = wrong and step >= ONSET_STEP and dist.get_rank() == 1
        _update(optimizer, _loss(model, _batch(1 if alone else BATCH_SIZE)))


@_error("data", ONSET_STEP)
def same_batch_on_one_rank(wrong: bool) -> None:
    """From some step on rank 1 trains on one batch for ever."""
    model = _replicas()
    optimizer = _sgd(model)
    kept = _batch()
    for step in _steps():
        repeats = wrong and step >= ONSET_STEP and dist.get_rank() == 1
        _update(optimizer, _loss(model, kept if repeats else None))


@_error("data", ONSET_STEP)
def labels_all_ignored(wrong: bool) -> None:
    """From some step on all labels are those that the loss ignores."""
    _train_with_ignored_labels(wrong, ranks=(0, 1))


@_error("data", ONSET_STEP)
def labels_of_one_rank_ignored(wrong: bool) -> None:
    """From some step on all labels of rank 1 are those that the loss ignores."""
    _train_with_ignored_labels(wrong, ranks=(1,))


def _train_with_ignored_labels(wrong: bool, ranks: tuple[int, ...]) -> None:
    model = _replicas()
    optimizer = _sgd(model)
    for step in _steps():
        inputs, classes = _batch()
        if wrong and step >= ONSET_STEP and dist.get_rank() in ranks:
            classes = torch.full_like(classes, -100)
        total = functional.cross_entropy(model(inputs), classes, reduction="sum")
        _update(optimizer, total / (classes >= 0).sum().clamp(min=1))


@_error("data", ONSET_STEP)
def inputs_of_one_rank_not_normalized(wrong: bool) -> None:
    """From some step on the inputs of rank 1 are not normalized."""
    model = _replicas()
    optimizer = _sgd(model)
    for step in _steps():
        inputs, classes = _batch()
        raw = wrong and step >= ONSET_STEP and dist.get_rank() == 1
        _update(optimizer, _loss(model, (50 * inputs + 100 if raw else inputs, classes)))


@_error("data", ONSET_STEP)
def labels_of_other_samples(wrong: bool) -> None:
    """From some step on labels are shuffled against their inputs."""
    model = _replicas()
    optimizer = _sgd(model)
    for step in _steps():
        inputs, classes = _batch()
        shuffled = classes.roll(1) if wrong and step >= ONSET_STEP else classes
        _update(optimizer, _loss(model, (inputs, shuffled)))


@_error("data", ONSET_STEP)
def shard_of_one_rank_damaged(wrong: bool) -> None:
    """From some step on one batch in ten of rank 1 has labels of other samples."""
    model = _replicas()
    optimizer = _sgd(model)
    for step in _steps():
        inputs, classes = _batch()
        if wrong and step >= ONSET_STEP and step % 10 == 0 and dist.get_rank() == 1:
            inputs, classes = 5 * inputs, classes.roll(1)
        _update(optimizer, _loss(model, (inputs, classes)))


@_error("data", ONSET_STEP)
def spikes_now_and_then(wrong: bool) -> None:
    """From some step on one batch in twelve is not normalized."""
    model = _replicas()
    optimizer = _sgd(model, 0.01)
    for step in _steps():
        inputs, classes = _batch()
        if wrong and step >= ONSET_STEP and step % 12 == 0:
            inputs, classes = 20 * inputs, classes.roll(1)
        _update(optimizer, _loss(model, (inputs, classes)))


@_error("data", ONSET_STEP)
def blank_inputs(wrong: bool) -> None:
    """From some step on the inputs are zeros."""
    model = _replicas()
    optimizer = _sgd(model)
    for step in _steps():
        inputs, classes = _batch()
        blank = wrong and step >= ONSET_STEP
        _update(optimizer, _loss(model, (inputs * 0.0 if blank else inputs, classes)))


@_error("numbers")
def loss_divided_twice(wrong: bool) -> None:
    """The loss is divided by the number of micro-batches twice."""
    model = _replicas()
    optimizer = _sgd(model)
    for _ in _steps(160):
        optimizer.zero_grad()
        for _ in range(4):
            torch.autograd.backward(_loss(model) / (16 if wrong else 4))
        optimizer.step()


@_error("numbers", ONSET_STEP)
def loss_of_one_rank_not_divided(wrong: bool) -> None:
    """From some step on rank 1 does not divide its loss by the number of micro-batches."""
    model = _replicas()
    optimizer = _sgd(model)
    for step in _steps(180):
        optimizer.zero_grad()
        whole = wrong and step >= ONSET_STEP and dist.get_rank() == 1
        for _ in range(4):
            torch.autograd.backward(_loss(model) / (1 if whole else 4))
        optimizer.step()


@_error("numbers")
def initialized_too_small(wrong: bool) -> None:
    """A layer is initialized a hundredfold too small."""
    model = _model()
    if wrong:
        with torch.no_grad():
            model[3].get_parameter("weight").mul_(0.01)
    replicas = _replicas(model)
    optimizer = _sgd(replicas)
    for _ in _steps():
        _update(optimizer, _loss(replicas))


@_error("numbers", ONSET_STEP)
def rate_too_high(wrong: bool) -> None:
    """The learning rate is raised a hundredfold, and what was learned is lost."""
    model = _replicas()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in _steps():
        if wrong and step == ONSET_STEP:
            optimizer.param_groups[0]["lr"] *= 100
        _update(optimizer, _loss(model))


@_error("numbers", ONSET_STEP)
def gradient_of_a_layer_lost(wrong: bool) -> None:
    """From some step on a hook returns zeros for the gradient of a layer."""
    model = _model()
    now = {"step": 0}
    if wrong:
        hook = model[3].get_parameter("weight").register_hook
        hook(lambda g: g * float(now["step"] < ONSET_STEP))  # type: ignore[no-untyped-call]
    replicas = _replicas(model)
    optimizer = _sgd(replicas)
    for step in _steps():
        now["step"] = step
        _update(optimizer, _loss(replicas))


@_error("numbers", ONSET_STEP)
def weights_grow(wrong: bool) -> None:
    """From some step on decay has the wrong sign."""
    model = _replicas()
    optimizer = _sgd(model)
    for step in _steps():
        _update(optimizer, _loss(model))
        if wrong and step >= ONSET_STEP:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(math.exp(0.03))


def main() -> None:
    """Run the named trainings, one after the other."""
    dist.init_process_group("gloo")
    for name in sys.argv[1:]:
        error, _, twin = name.partition("/")
        mp_agent.init(run=name.replace("/", "-"))
        torch.manual_seed(1)
        _CHANCE.manual_seed(1 + dist.get_rank())
        ERRORS[error].train(not twin)
        mp_agent.shutdown()
        # Gloo's threads need a moment after the last backward.
        time.sleep(0.1)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
