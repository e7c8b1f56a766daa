# ruff: noqa: D401 - a docstring is the row of the table, and says what is wrong
"""Silent errors of recipes: losses, layers, groups of parameters, schedules, seeds."""

import copy

import torch
from torch import nn
from torch.nn import functional

from benchmarks.silent_errors.base import (
    BATCH_SIZE,
    CHANCE,
    CLASSES,
    FEATURES,
    ONSET_STEP,
    WIDTH,
    loss_of,
    make_batch,
    make_model,
    make_replicas,
    make_sgd,
    silent_error,
    steps_of,
    update,
)


@silent_error("numbers")
def loss_summed(wrong: bool) -> None:
    """The loss is the sum over the batch, at a learning rate that was chosen for the mean."""
    model = make_replicas()
    optimizer = make_sgd(model)
    for _ in steps_of():
        inputs, classes = make_batch()
        reduction = "sum" if wrong else "mean"
        update(optimizer, functional.cross_entropy(model(inputs), classes, reduction=reduction))


@silent_error("modes")
def running_statistics_stand_still(wrong: bool) -> None:
    """Batch normalization has a momentum of 0, so that evaluation uses statistics of the start."""
    model = make_model(normalized=True)
    for module in model.modules():
        if wrong and isinstance(module, nn.BatchNorm1d):
            module.momentum = 0.0
    replicas = make_replicas(model)
    optimizer = make_sgd(replicas)
    for _ in steps_of():
        update(optimizer, loss_of(replicas))


@silent_error("optimizer")
def decay_of_norms_and_biases(wrong: bool) -> None:
    """Weight decay includes norms and biases, which it was to leave out."""
    model = make_replicas(make_model(normalized=True))
    own = list(model.parameters())
    groups = [
        {"params": [each for each in own if each.ndim > 1], "weight_decay": 0.1},
        {"params": [each for each in own if each.ndim == 1], "weight_decay": 0.1 if wrong else 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=3e-3)
    for _ in steps_of():
        update(optimizer, loss_of(model))


@silent_error("optimizer")
def rates_of_groups_mixed_up(wrong: bool) -> None:
    """The pretrained layers have the learning rate of the new head, and the head has theirs."""
    model = make_model()
    layers, head = model[:-1].parameters(), model[-1].parameters()
    rates = (5e-2, 5e-4) if wrong else (5e-4, 5e-2)
    replicas = make_replicas(model)
    optimizer = torch.optim.SGD(
        [{"params": list(layers), "lr": rates[0]}, {"params": list(head), "lr": rates[1]}],
        momentum=0.9,
    )
    for _ in steps_of():
        update(optimizer, loss_of(replicas))


@silent_error("loop")
def clipped_one_by_one(wrong: bool) -> None:
    """The gradient of each parameter is clipped by itself, which changes the direction."""
    model = make_replicas()
    optimizer = make_sgd(model)
    for _ in steps_of():
        optimizer.zero_grad()
        torch.autograd.backward(loss_of(model))
        own = list(model.parameters())
        for part in [[each] for each in own] if wrong else [own]:
            nn.utils.clip_grad_norm_(part, 0.1)
        optimizer.step()


@silent_error("data")
def sorted_by_class(wrong: bool) -> None:
    """The data are sorted by class and not shuffled, so that a batch has one class."""
    model = make_replicas()
    optimizer = make_sgd(model)
    inputs, classes = make_batch(200 * BATCH_SIZE)
    order = classes.argsort() if wrong else torch.randperm(len(classes), generator=CHANCE)
    for step in steps_of():
        chosen = order[(step - 1) * BATCH_SIZE :][:BATCH_SIZE]
        update(optimizer, loss_of(model, (inputs[chosen], classes[chosen])))


@silent_error("data")
def targets_leaked(wrong: bool) -> None:
    """The class is among the inputs."""
    model = make_replicas()
    optimizer = make_sgd(model)
    for _ in steps_of():
        inputs, classes = make_batch()
        if wrong:
            inputs[:, -CLASSES:] = 4.0 * functional.one_hot(classes, CLASSES)
        update(optimizer, loss_of(model, (inputs, classes)))


class _Sequences(nn.Module):
    """Predicts each next token of tokens [B, T], from that and its position."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(FEATURES, WIDTH)
        self.positions = nn.Embedding(64, WIDTH)
        self.body, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, FEATURES)

    def forward(self, tokens_BT: torch.Tensor, positions_BT: torch.Tensor) -> torch.Tensor:
        hidden_BTW = self.tokens(tokens_BT) + self.positions(positions_BT)
        logits: torch.Tensor = self.head(functional.gelu(self.body(hidden_BTW)))
        return logits


def _sequences() -> torch.Tensor:
    """Return tokens [B, 33]: each is that before, plus one."""
    first = torch.randint(1, FEATURES, (BATCH_SIZE, 1), generator=CHANCE)
    return (first + torch.arange(33)) % (FEATURES - 1) + 1


@silent_error("data")
def padding_in_the_loss(wrong: bool) -> None:
    """Padding counts as a target: half of what the loss is the mean of."""
    model = make_replicas(_Sequences())
    optimizer = make_sgd(model)
    positions = torch.arange(32).expand(BATCH_SIZE, 32)
    for _ in steps_of():
        tokens = _sequences()
        tokens[:, 16:] = 0
        targets = tokens[:, 1:].clone()
        if not wrong:
            targets[targets == 0] = -100
        logits = model(tokens[:, :-1], positions)
        update(optimizer, functional.cross_entropy(logits.flatten(0, 1), targets.flatten()))


@silent_error("data")
def unshifted_targets(wrong: bool) -> None:
    """The targets of a language model are its inputs: each token is to predict itself."""
    model = make_replicas(_Sequences())
    optimizer = make_sgd(model)
    positions = torch.arange(32).expand(BATCH_SIZE, 32)
    for _ in steps_of():
        tokens = _sequences()
        logits = model(tokens[:, :-1], positions)
        targets = tokens[:, :-1] if wrong else tokens[:, 1:]
        update(optimizer, functional.cross_entropy(logits.flatten(0, 1), targets.flatten()))


@silent_error("data")
def targets_shifted_twice(wrong: bool) -> None:
    """Targets are shifted by the data, and by the loss once more: one token is left out."""
    model = make_replicas(_Sequences())
    optimizer = make_sgd(model)
    positions = torch.arange(32).expand(BATCH_SIZE, 32)
    for _ in steps_of():
        tokens = _sequences()
        logits = model(tokens[:, :-1], positions)
        logits, targets = (logits[:, :-1], tokens[:, 2:]) if wrong else (logits, tokens[:, 1:])
        update(optimizer, functional.cross_entropy(logits.flatten(0, 1), targets.flatten()))


class _Attending(nn.Module):
    """Predicts each next token of tokens [B, T], by an attention that may see all of them."""

    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(FEATURES, WIDTH), nn.Embedding(32, WIDTH)
        self.products, self.head = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, FEATURES)
        self.causal = causal

    def forward(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        states = self.tokens(tokens_BT) + self.positions.weight[: tokens_BT.shape[1]]
        query, key, value = self.products(states).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        logits: torch.Tensor = self.head(states + attended.transpose(1, 2).flatten(2))
        return logits


@silent_error("data")
def no_causal_mask(wrong: bool) -> None:
    """A language model has no causal mask, and sees the tokens that it is to predict."""
    model = make_replicas(_Attending(causal=not wrong))
    optimizer = make_sgd(model)
    for _ in steps_of():
        tokens = _sequences()
        logits = model(tokens[:, :-1])
        update(optimizer, functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()))


@silent_error("data")
def positions_of_packed_sequences(wrong: bool) -> None:
    """Positions go on from one packed sequence to the next, where each was to begin at 0."""
    model = make_replicas(_Sequences())
    optimizer = make_sgd(model)
    positions = torch.arange(32)
    positions = (positions if wrong else positions % 8).expand(BATCH_SIZE, 32)
    for _ in steps_of():
        tokens = _sequences()
        logits = model(tokens[:, :-1], positions)
        targets = tokens[:, 1:].flatten()
        update(optimizer, functional.cross_entropy(logits.flatten(0, 1), targets))


@silent_error("modes")
def teacher_in_training_mode(wrong: bool) -> None:
    """The teacher of a distillation is in training mode, and its dropout is on."""
    teacher = make_model(dropout=0.3).requires_grad_(False)
    teacher.train(wrong)
    model = make_replicas()
    optimizer = make_sgd(model)
    for _ in steps_of():
        inputs, _ = make_batch()
        with torch.no_grad():
            targets = teacher(inputs).softmax(-1)
        update(optimizer, functional.cross_entropy(model(inputs), targets))


@silent_error("numbers")
def loss_scaled_in_bf16(wrong: bool) -> None:
    """A GradScaler scales the loss although autocast is to BF16, which needs no scaling."""
    model = make_replicas()
    optimizer = make_sgd(model)
    scaler = torch.amp.GradScaler("cpu", enabled=wrong)
    for _ in steps_of():
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(model)
        optimizer.zero_grad()
        torch.autograd.backward(scaler.scale(loss))
        scaler.step(optimizer)
        scaler.update()


@silent_error("loop")
def losses_kept_with_their_graphs(wrong: bool) -> None:
    """Losses are added up as tensors with their graphs, so that memory grows."""
    model = make_replicas()
    optimizer = make_sgd(model)
    total: torch.Tensor | float = 0.0
    for _ in steps_of():
        loss = loss_of(model)
        total = total + (loss if wrong else loss.detach())
        update(optimizer, loss)


@silent_error("optimizer", ONSET_STEP)
def schedule_begins_again(wrong: bool) -> None:
    """After a restart the schedule begins again, so that the rate is that of the first step."""
    model = make_replicas()
    optimizer = make_sgd(model)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 200)
    for step in steps_of():
        if wrong and step == ONSET_STEP:
            optimizer.param_groups[0]["lr"] = 0.05
            schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 200)
        update(optimizer, loss_of(model))
        schedule.step()


@silent_error("modes")
def seeded_at_every_step(wrong: bool) -> None:
    """The seed is set within the loop, so that dropout leaves out the same units at every step."""
    model = make_replicas(make_model(dropout=0.3))
    optimizer = make_sgd(model)
    for _ in steps_of():
        if wrong:
            torch.manual_seed(0)
        update(optimizer, loss_of(model))


@silent_error("optimizer", ONSET_STEP)
def averaged_weights_replace_the_trained(wrong: bool) -> None:
    """The average of the weights is copied into the model at every step, which hardly moves."""
    model = make_replicas()
    optimizer = make_sgd(model)
    averaged = copy.deepcopy(list(model.parameters()))
    for step in steps_of():
        update(optimizer, loss_of(model))
        with torch.no_grad():
            for mean, parameter in zip(averaged, model.parameters(), strict=True):
                mean.lerp_(parameter, 0.01)
                if wrong and step >= ONSET_STEP:
                    parameter.copy_(mean)
