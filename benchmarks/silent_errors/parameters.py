# ruff: noqa: D401 - a docstring is the row of the table, and says what is wrong
"""Silent errors of what is trained: parameters, and the state of their optimizer."""

import copy
from types import SimpleNamespace
from typing import ClassVar, cast

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from benchmarks.silent_errors.base import (
    CLASSES,
    FEATURES,
    ONSET_STEP,
    WIDTH,
    average,
    loss_of,
    make_batch,
    make_model,
    make_replicas,
    make_sgd,
    silent_error,
    steps_of,
    update,
)


@silent_error("optimizer")
def head_replaced_after_the_optimizer(wrong: bool) -> None:
    """The optimizer is made before the last layer is replaced."""
    model = make_model()
    optimizer = make_sgd(model)
    model[-1] = nn.Linear(WIDTH, CLASSES)
    if not wrong:
        optimizer = make_sgd(model)
    replicas = make_replicas(model)
    for _ in steps_of():
        update(optimizer, loss_of(replicas))


@silent_error("optimizer")
def optimizer_of_a_copy(wrong: bool) -> None:
    """The optimizer holds the parameters of the model that a copy was made of."""
    model = make_model()
    trained = copy.deepcopy(model)
    optimizer = make_sgd(model if wrong else trained)
    replicas = make_replicas(trained)
    for _ in steps_of():
        optimizer.zero_grad()
        replicas.zero_grad()
        torch.autograd.backward(loss_of(replicas))
        optimizer.step()


@silent_error("optimizer")
def layer_detached(wrong: bool) -> None:
    """`detach` in the forward pass cuts the first layers off."""
    model = make_replicas(_Detached(wrong), find_unused=True)
    optimizer = make_sgd(model)
    for _ in steps_of():
        update(optimizer, loss_of(model))


class _Detached(nn.Module):
    def __init__(self, detached: bool) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.detached = detached

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = functional.gelu(self.first(inputs))
        logits: torch.Tensor = self.last(hidden.detach() if self.detached else hidden)
        return logits


@silent_error("optimizer", ONSET_STEP)
def layer_detached_later(wrong: bool) -> None:
    """From some step on a `detach` cuts the first layers off."""
    layers = _Detached(detached=False)
    model = make_replicas(layers, find_unused=True)
    optimizer = make_sgd(model)
    for step in steps_of():
        layers.detached = wrong and step >= ONSET_STEP
        update(optimizer, loss_of(model))


@silent_error("optimizer")
def gradients_lost_in_checkpointing(wrong: bool) -> None:
    """Reentrant checkpointing behind a frozen first layer gives the layers in it no gradient."""
    first = nn.Linear(FEATURES, WIDTH).requires_grad_(False)
    body = nn.Sequential(nn.GELU(), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
    model = nn.ModuleDict({"first": first, "body": body, "head": nn.Linear(WIDTH, CLASSES)})
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
    for _ in steps_of():
        inputs, classes = make_batch()
        hidden = first(inputs)
        if not wrong:
            hidden.requires_grad_()
        hidden = checkpoint(body, hidden, use_reentrant=True)
        optimizer.zero_grad()
        torch.autograd.backward(functional.cross_entropy(model["head"](hidden), classes))
        average(model)
        optimizer.step()


class _Adapted(nn.Module):
    def __init__(self, base: nn.Linear, scale: float) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(scale * torch.randn(2, base.in_features))
        self.up = nn.Parameter(torch.zeros(base.out_features, 2))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.base(inputs) + inputs @ self.down.T @ self.up.T
        return outputs


@silent_error("optimizer")
def adapters_of_zeros(wrong: bool) -> None:
    """Both matrices of each low-rank adapter are initialized to 0, where one is to be random."""
    model = make_model()
    for place in (0, 3, 5):
        model[place] = _Adapted(cast(nn.Linear, model[place]), 0.0 if wrong else 0.3)
    replicas = make_replicas(model)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
    for _ in steps_of():
        update(optimizer, loss_of(replicas))


class _Tied(nn.Module):
    _tied_weights_keys: ClassVar = {"head.weight": "embedding.weight"}

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(FEATURES, WIDTH)
        self.body = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, FEATURES, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(functional.gelu(self.body(self.embedding(tokens))))
        return logits

    def get_input_embeddings(self) -> nn.Module:
        """Return what models of Transformers return."""
        return self.embedding

    def get_output_embeddings(self) -> nn.Module:
        """Return what models of Transformers return."""
        return self.head


def _update_tied(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    inputs, _ = make_batch()
    tokens = inputs.abs().argmax(1)
    update(optimizer, functional.cross_entropy(model(tokens), (tokens + 1) % FEATURES))


@silent_error("optimizer")
def tied_weights_parted(wrong: bool) -> None:
    """A checkpoint is loaded by assignment, after which two tied weights are no longer one."""
    model = _Tied()
    if wrong:
        state = {name: value.clone() for name, value in model.state_dict().items()}
        model.load_state_dict(state, assign=True)
    replicas = make_replicas(model)
    optimizer = make_sgd(replicas)
    for _ in steps_of():
        _update_tied(replicas, optimizer)


@silent_error("optimizer", ONSET_STEP)
def tied_weights_parted_later(wrong: bool) -> None:
    """From some step on a checkpoint that was loaded by assignment has parted two tied weights."""
    model = _Tied()
    replicas, optimizer = make_replicas(model), make_sgd(model)
    for step in steps_of():
        if step == ONSET_STEP:
            state = {name: value.clone() for name, value in model.state_dict().items()}
            model.load_state_dict(state, assign=wrong)
            replicas, optimizer = make_replicas(model), make_sgd(model)
        _update_tied(replicas, optimizer)


@silent_error("optimizer")
def embeddings_said_to_be_tied(wrong: bool) -> None:
    """Loading has parted weights of which the configuration of the model says that they are one."""
    model = _Tied()
    model.config = SimpleNamespace(tie_word_embeddings=True)  # type: ignore[assignment]
    if wrong:
        state = {name: value.clone() for name, value in model.state_dict().items()}
        model.load_state_dict(state, assign=True)
    replicas = make_replicas(model)
    optimizer = make_sgd(replicas)
    for _ in steps_of():
        _update_tied(replicas, optimizer)


def _resume(*, optimizer_state: bool, schedule_state: bool) -> None:
    """Train on after 1000 steps, with what a checkpoint has of the optimizer and the schedule."""
    model = make_replicas()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    if optimizer_state:
        state = {
            place: {
                "step": torch.tensor(1000.0),
                "exp_avg": torch.zeros_like(each),
                "exp_avg_sq": torch.full_like(each, 1e-4),
            }
            for place, each in enumerate(model.parameters())
        }
        optimizer.load_state_dict(optimizer.state_dict() | {"state": state})
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 2000)
    if schedule_state:
        schedule.load_state_dict(schedule.state_dict() | {"last_epoch": 1000})
    for _ in steps_of():
        update(optimizer, loss_of(model))
        schedule.step()


@silent_error("optimizer", 1001)
def resumed_without_the_optimizer(wrong: bool) -> None:
    """The weights and the schedule go on after 1000 steps, and the optimizer is a new one."""
    _resume(optimizer_state=not wrong, schedule_state=True)


@silent_error("optimizer", 1001)
def resumed_without_the_schedule(wrong: bool) -> None:
    """The run resumes with the state of its optimizer, and its schedule is a new one."""
    _resume(optimizer_state=True, schedule_state=not wrong)


@silent_error("optimizer", ONSET_STEP)
def state_of_the_optimizer_lost(wrong: bool) -> None:
    """The run resumes with the weights of its checkpoint and a new optimizer."""
    model = make_replicas()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for step in steps_of():
        if step == ONSET_STEP:
            state = copy.deepcopy(optimizer.state_dict())
            optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
            if not wrong:
                optimizer.load_state_dict(state)
        update(optimizer, loss_of(model))


@silent_error("optimizer", ONSET_STEP)
def layer_replaced_later(wrong: bool) -> None:
    """From some step on the model has a new last layer, which no optimizer holds."""
    model = make_model()
    replicas, optimizer = make_replicas(model), make_sgd(model)
    for step in steps_of():
        if step == ONSET_STEP:
            model[-1] = nn.Linear(WIDTH, CLASSES)
            replicas = make_replicas(model)
            optimizer = optimizer if wrong else make_sgd(model)
        optimizer.zero_grad()
        replicas.zero_grad()
        torch.autograd.backward(loss_of(replicas))
        optimizer.step()


@silent_error("optimizer")
def layer_frozen(wrong: bool) -> None:
    """A layer that was to be trained has `requires_grad=False`."""
    model = make_model()
    if wrong:
        model[0].requires_grad_(False)
    replicas = make_replicas(model)
    optimizer = make_sgd(replicas)
    for _ in steps_of():
        update(optimizer, loss_of(replicas))


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


@silent_error("optimizer", ONSET_STEP)
def update_lost(wrong: bool) -> None:
    """From some step on the update goes to a copy of the weights."""
    model = make_replicas()
    optimizer = _Forgetful(model.parameters(), lr=0.05)
    for step in steps_of():
        optimizer.wrong = wrong and step >= ONSET_STEP
        update(optimizer, loss_of(model))


@silent_error("optimizer")
def update_below_the_format(wrong: bool) -> None:
    """BF16 weights without masters, at a learning rate below their spacing."""
    model = make_replicas(make_model().to(torch.bfloat16))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-7 if wrong else 0.5)
    for _ in steps_of():
        inputs, classes = make_batch()
        logits = model(inputs.to(torch.bfloat16)).float()
        update(optimizer, functional.cross_entropy(logits, classes))


@silent_error("optimizer")
def adam_state_in_fp16(wrong: bool) -> None:
    """Adam on FP16 weights with an epsilon that FP16 rounds to 0."""
    model = make_replicas(make_model().half())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, eps=1e-8 if wrong else 1e-4)
    for _ in steps_of():
        inputs, classes = make_batch()
        update(optimizer, functional.cross_entropy(model(inputs.half()).float(), classes))


@silent_error("optimizer")
def frozen_head_and_trained_norms(wrong: bool) -> None:
    """The head that the optimizer holds is frozen, and the norms that it does not hold are not."""
    model = make_model(normalized=True)
    optimizer = make_sgd(model[-1])
    for parameter in model[:-1].parameters():
        parameter.requires_grad_(False)
    if wrong:
        model[-1].requires_grad_(False)
        model[1].requires_grad_(True)
    replicas = make_replicas(model)
    for _ in steps_of():
        update(optimizer, loss_of(replicas))
