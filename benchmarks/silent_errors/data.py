# ruff: noqa: D401 - a docstring is the row of the table, and says what is wrong
"""Silent errors of the data, and of single numbers of a recipe."""

import math
from collections.abc import Iterator
from itertools import islice

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
    TensorDataset,
    get_worker_info,
)

from benchmarks.silent_errors.base import (
    BATCH_SIZE,
    CHANCE,
    CLASSES,
    ONSET_STEP,
    STEPS,
    loss_of,
    make_batch,
    make_model,
    make_replicas,
    make_sgd,
    silent_error,
    steps_of,
    update,
)


def _data_set(seed: int = 0) -> TensorDataset:
    CHANCE.manual_seed(seed)
    return TensorDataset(*make_batch(40 * BATCH_SIZE))


def _endless(loader: DataLoader[tuple[torch.Tensor, ...]]) -> Iterator[list[torch.Tensor]]:
    while True:
        yield from loader


@silent_error("data")
def no_distributed_sampler(wrong: bool) -> None:
    """Every rank reads the whole data set in the same order."""
    model = make_replicas()
    optimizer = make_sgd(model)
    data = _data_set()
    torch.manual_seed(0)
    sampler: DistributedSampler[tuple[torch.Tensor, ...]] | None = None
    if not wrong:
        sampler = DistributedSampler(data)
    loader = DataLoader(data, BATCH_SIZE, shuffle=wrong, sampler=sampler)
    batches = _endless(loader)
    for _ in steps_of():
        inputs, classes = next(batches)
        update(optimizer, loss_of(model, (inputs, classes)))


@silent_error("data")
def first_batch_again(wrong: bool) -> None:
    """`next(iter(loader))` in the loop returns the first batch at every step."""
    model = make_replicas()
    optimizer = make_sgd(model)
    data = _data_set(dist.get_rank())
    loader = DataLoader(data, BATCH_SIZE)
    batches = _endless(loader)
    for _ in steps_of():
        inputs, classes = next(iter(loader)) if wrong else next(batches)
        update(optimizer, loss_of(model, (inputs, classes)))


class _Stream(IterableDataset[tuple[torch.Tensor, torch.Tensor]]):
    """Samples of one rank; divided: each worker of a loader takes its part."""

    def __init__(self, divided: bool) -> None:
        self._divided, self._seed = divided, dist.get_rank()

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        worker = get_worker_info()
        part, parts = (worker.id, worker.num_workers) if worker and self._divided else (0, 1)
        CHANCE.manual_seed(self._seed)
        samples = zip(*make_batch(1000 * BATCH_SIZE), strict=True)
        return islice(samples, part, None, parts)


@silent_error("data")
def stream_read_by_each_worker(wrong: bool) -> None:
    """Two workers of a loader each read the whole stream, so that each batch comes twice."""
    model = make_replicas()
    optimizer = make_sgd(model)
    loader = DataLoader(_Stream(not wrong), BATCH_SIZE, num_workers=2)
    for _, (inputs, classes) in zip(steps_of(), loader, strict=False):
        update(optimizer, loss_of(model, (inputs, classes)))


@silent_error("data", ONSET_STEP)
def one_sample_on_one_rank(wrong: bool) -> None:
    """From some step on the batches of rank 1 have one sample."""
    model = make_replicas()
    optimizer = make_sgd(model)
    for step in steps_of():
        alone = wrong and step >= ONSET_STEP and dist.get_rank() == 1
        update(optimizer, loss_of(model, make_batch(1 if alone else BATCH_SIZE)))


@silent_error("data", ONSET_STEP)
def same_batch_on_one_rank(wrong: bool) -> None:
    """From some step on rank 1 trains on the same batch."""
    model = make_replicas()
    optimizer = make_sgd(model)
    kept = make_batch()
    for step in steps_of():
        repeats = wrong and step >= ONSET_STEP and dist.get_rank() == 1
        update(optimizer, loss_of(model, kept if repeats else None))


@silent_error("data", ONSET_STEP)
def labels_all_ignored(wrong: bool) -> None:
    """From some step on all labels are those that the loss ignores."""
    _train_with_ignored_labels(wrong, ranks=(0, 1))


@silent_error("data", ONSET_STEP)
def labels_of_one_rank_ignored(wrong: bool) -> None:
    """From some step on all labels of rank 1 are those that the loss ignores."""
    _train_with_ignored_labels(wrong, ranks=(1,))


def _train_with_ignored_labels(wrong: bool, ranks: tuple[int, ...]) -> None:
    model = make_replicas()
    optimizer = make_sgd(model)
    for step in steps_of():
        inputs, classes = make_batch()
        if wrong and step >= ONSET_STEP and dist.get_rank() in ranks:
            classes = torch.full_like(classes, -100)
        total = functional.cross_entropy(model(inputs), classes, reduction="sum")
        update(optimizer, total / (classes >= 0).sum().clamp(min=1))


@silent_error("data", ONSET_STEP)
def inputs_of_one_rank_not_normalized(wrong: bool) -> None:
    """From some step on the inputs of rank 1 are not normalized."""
    model = make_replicas()
    optimizer = make_sgd(model)
    for step in steps_of():
        inputs, classes = make_batch()
        raw = wrong and step >= ONSET_STEP and dist.get_rank() == 1
        update(optimizer, loss_of(model, (50 * inputs + 100 if raw else inputs, classes)))


@silent_error("data", ONSET_STEP)
def labels_of_other_samples(wrong: bool) -> None:
    """From some step on labels are shuffled against their inputs."""
    model = make_replicas()
    optimizer = make_sgd(model)
    for step in steps_of():
        inputs, classes = make_batch()
        shuffled = classes.roll(1) if wrong and step >= ONSET_STEP else classes
        update(optimizer, loss_of(model, (inputs, shuffled)))


@silent_error("data", ONSET_STEP)
def shard_of_one_rank_damaged(wrong: bool) -> None:
    """From some step on one batch in ten of rank 1 has labels of other samples."""
    model = make_replicas()
    optimizer = make_sgd(model)
    for step in steps_of():
        inputs, classes = make_batch()
        if wrong and step >= ONSET_STEP and step % 10 == 0 and dist.get_rank() == 1:
            inputs, classes = 5 * inputs, classes.roll(1)
        update(optimizer, loss_of(model, (inputs, classes)))


@silent_error("data", ONSET_STEP)
def spikes_now_and_then(wrong: bool) -> None:
    """From some step on one batch in twelve is not normalized."""
    model = make_replicas()
    optimizer = make_sgd(model, 0.01)
    for step in steps_of():
        inputs, classes = make_batch()
        if wrong and step >= ONSET_STEP and step % 12 == 0:
            inputs, classes = 20 * inputs, classes.roll(1)
        update(optimizer, loss_of(model, (inputs, classes)))


@silent_error("data", ONSET_STEP)
def blank_inputs(wrong: bool) -> None:
    """From some step on the inputs are zeros."""
    model = make_replicas()
    optimizer = make_sgd(model)
    for step in steps_of():
        inputs, classes = make_batch()
        blank = wrong and step >= ONSET_STEP
        update(optimizer, loss_of(model, (inputs * 0.0 if blank else inputs, classes)))


@silent_error("numbers")
def loss_divided_twice(wrong: bool) -> None:
    """The loss is divided by the number of micro-batches twice."""
    model = make_replicas()
    optimizer = make_sgd(model)
    for _ in steps_of(160):
        optimizer.zero_grad()
        for _ in range(4):
            torch.autograd.backward(loss_of(model) / (16 if wrong else 4))
        optimizer.step()


@silent_error("numbers", ONSET_STEP)
def loss_of_one_rank_not_divided(wrong: bool) -> None:
    """From some step on rank 1 does not divide its loss by the number of micro-batches."""
    model = make_replicas()
    optimizer = make_sgd(model)
    for step in steps_of(180):
        optimizer.zero_grad()
        whole = wrong and step >= ONSET_STEP and dist.get_rank() == 1
        for _ in range(4):
            torch.autograd.backward(loss_of(model) / (1 if whole else 4))
        optimizer.step()


@silent_error("numbers")
def initialized_too_small(wrong: bool) -> None:
    """A layer is initialized a hundredfold too small."""
    model = make_model()
    if wrong:
        with torch.no_grad():
            model[3].get_parameter("weight").mul_(0.01)
    replicas = make_replicas(model)
    optimizer = make_sgd(replicas)
    for _ in steps_of():
        update(optimizer, loss_of(replicas))


@silent_error("numbers")
def softmax_applied_twice(wrong: bool) -> None:
    """The model ends in softmax, which cross-entropy applies as well."""
    model = make_model()
    if wrong:
        model.append(nn.Softmax(dim=1))
    replicas = make_replicas(model)
    optimizer = make_sgd(replicas)
    for _ in steps_of():
        update(optimizer, loss_of(replicas))


@silent_error("numbers")
def targets_broadcast(wrong: bool) -> None:
    """Outputs [B, 1] are compared with targets [B], so that each is with all targets."""
    replicas = make_replicas(nn.Sequential(make_model(), nn.Linear(CLASSES, 1)))
    optimizer = make_sgd(replicas, 0.01)
    for _ in steps_of():
        inputs, classes = make_batch()
        outputs = replicas(inputs)
        difference = (outputs if wrong else outputs.squeeze(1)) - classes
        update(optimizer, difference.square().mean())


@silent_error("data")
def epoch_not_set(wrong: bool) -> None:
    """Every epoch has the order of the first: set_epoch is never called."""
    model = make_replicas()
    optimizer = make_sgd(model)
    data = _data_set()
    sampler: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(data)
    loader = DataLoader(data, BATCH_SIZE, sampler=sampler)
    steps = steps_of()
    for epoch in range(STEPS // len(loader)):
        if not wrong:
            sampler.set_epoch(epoch)
        for inputs, classes in loader:
            next(steps)
            update(optimizer, loss_of(model, (inputs, classes)))


@silent_error("data")
def sampler_made_again(wrong: bool) -> None:
    """Every epoch has the order of the first: each makes a new sampler, whose epoch is 0."""
    model = make_replicas()
    optimizer = make_sgd(model)
    data = _data_set()
    steps = steps_of()
    for epoch in range(10):
        sampler: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(data)
        if not wrong:
            sampler.set_epoch(epoch)
        for inputs, classes in DataLoader(data, BATCH_SIZE, sampler=sampler):
            next(steps)
            update(optimizer, loss_of(model, (inputs, classes)))


@silent_error("data")
def seeded_in_every_epoch(wrong: bool) -> None:
    """Every epoch has the order of the first: each sets the seed that the loader's follows from."""
    model = make_replicas(make_model(dropout=0.1))
    optimizer = make_sgd(model)
    data = _data_set(seed=dist.get_rank())
    loader = DataLoader(data, 2 * BATCH_SIZE, shuffle=True)
    steps = steps_of()
    for epoch in range(STEPS // len(loader)):
        torch.manual_seed(0 if wrong else epoch)
        for inputs, classes in loader:
            next(steps)
            update(optimizer, loss_of(model, (inputs, classes)))


@silent_error("numbers")
def softmax_along_the_batch(wrong: bool) -> None:
    """The logarithms of a softmax are taken along the batch, and not along the classes."""
    model = make_replicas()
    optimizer = make_sgd(model)
    for _ in steps_of():
        inputs, classes = make_batch()
        logarithms = model(inputs).log_softmax(0 if wrong else 1)
        update(optimizer, functional.nll_loss(logarithms, classes))


@silent_error("numbers")
def softmax_twice_by_hand(wrong: bool) -> None:
    """The outputs are divided exponentials, and cross-entropy applies a softmax to them."""
    model = make_replicas()
    optimizer = make_sgd(model)
    for _ in steps_of():
        inputs, classes = make_batch()
        outputs = model(inputs)
        if wrong:
            outputs = outputs.exp()
            outputs = outputs / outputs.sum(1, keepdim=True)
        update(optimizer, functional.cross_entropy(outputs, classes))


@silent_error("numbers", ONSET_STEP)
def rate_too_high(wrong: bool) -> None:
    """The learning rate is raised a hundredfold, and what was learned is lost."""
    model = make_replicas()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in steps_of():
        if wrong and step == ONSET_STEP:
            optimizer.param_groups[0]["lr"] *= 100
        update(optimizer, loss_of(model))


@silent_error("numbers", ONSET_STEP)
def gradient_of_a_layer_lost(wrong: bool) -> None:
    """From some step on a hook returns zeros for the gradient of a layer."""
    model = make_model()
    now = {"step": 0}
    if wrong:
        hook = model[3].get_parameter("weight").register_hook
        hook(lambda g: g * float(now["step"] < ONSET_STEP))  # type: ignore[no-untyped-call]
    replicas = make_replicas(model)
    optimizer = make_sgd(replicas)
    for step in steps_of():
        now["step"] = step
        update(optimizer, loss_of(replicas))


@silent_error("numbers", ONSET_STEP)
def weights_grow(wrong: bool) -> None:
    """From some step on decay has the wrong sign."""
    model = make_replicas()
    optimizer = make_sgd(model)
    for step in steps_of():
        update(optimizer, loss_of(model))
        if wrong and step >= ONSET_STEP:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(math.exp(0.03))
