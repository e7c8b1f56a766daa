"""What is recorded of loops whose random numbers, or whose batches, repeat, and of healthy ones."""

from collections.abc import Callable, Iterable, Iterator
from copy import deepcopy
from functools import partial
from itertools import islice

import pytest
import torch
from torch import Tensor, manual_seed, nn
from torch._compile import _disable_dynamo
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from mp_agent.catalog.thresholds import DEFAULTS
from mp_agent.records.columns import EPOCH_REPEATED, SEED_REPEATED

STEPS = 48
BATCHES, EPOCHS = 6, 8
_COLUMNS = (SEED_REPEATED, EPOCH_REPEATED)
_LONG = int(DEFAULTS["loop_mistake_steps"])

Batch = tuple[Tensor, Tensor]
Loop = Callable[[], object]

pytestmark = pytest.mark.slow


class Training:
    """A classifier that drops some of its activations, if any, and its optimizer."""

    def __init__(self, *, dropout: float = 0.2) -> None:
        dropping = [nn.Dropout(dropout)] if dropout else []
        self.model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), *dropping, nn.Linear(16, 4))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05)

    def backward(self, batch: Batch) -> None:
        """Add the gradients of a batch."""
        inputs, classes = batch
        cross_entropy(self.model(inputs), classes).backward()

    def step(self, *batches: Batch) -> None:
        """Train on one or more batches."""
        self.optimizer.zero_grad()
        for each in batches:
            self.backward(each)
        self.optimizer.step()


def own_batch(step: int) -> Batch:
    """Return inputs [8, 8], and classes [8], of a generator of their own."""
    inputs = torch.randn(8, 8, generator=torch.Generator().manual_seed(step))
    return inputs, (inputs.sum(1) > 0).long()


def seeded(seed: Callable[[int], object], *, dropout: float = 0.2) -> None:
    """Train, and call `seed` with the number of the step before each."""
    training = Training(dropout=dropout)
    for step in range(STEPS):
        seed(step)
        training.step(own_batch(step))


def seeded_under_another_name(step: int) -> None:
    torch.random.manual_seed(7)


def seeded_after_each_step() -> None:
    training = Training()
    for step in range(STEPS):
        training.step(own_batch(step))
        torch.manual_seed(7)


def seeded_for_noise() -> None:
    training = Training(dropout=0.0)
    for step in range(STEPS):
        torch.manual_seed(7)
        inputs, classes = own_batch(step)
        training.step((inputs + torch.randn(8, 8), classes))


def accumulated(*, seed: Callable[[int, int], int]) -> None:
    """Train on three batches a step, each after its seed."""
    training = Training()
    for step in range(STEPS):
        training.optimizer.zero_grad()
        for part in range(3):
            torch.manual_seed(seed(step, part))
            training.backward(own_batch(3 * step + part))
        training.optimizer.step()


def seeded_as_before_the_run() -> None:
    torch.manual_seed(0)
    seeded(lambda step: None)


def samples_apart(step: int, *, seed: int = 7) -> None:
    """Draw what is the same on each step, and leave the numbers of training as they were."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        torch.randn(3)


samples_of_the_run = partial(samples_apart, seed=0)


def restores_by_hand(step: int) -> None:
    state = torch.get_rng_state()
    torch.manual_seed(0)
    torch.randn(3)
    torch.set_rng_state(state)


def restores_the_generator(step: int) -> None:
    state = torch.default_generator.get_state()
    torch.manual_seed(7)
    torch.randn(3)
    torch.default_generator.set_state(state)


def restores_what_is_not_drawn(sample: Callable[[int], object]) -> None:
    """Begin with the seed of the samples, of which the weights have drawn, and draw no more."""
    torch.manual_seed(0)
    seeded(sample, dropout=0.0)


def of_varied_length(step: int) -> None:
    """Draw as many numbers as another batch needs."""
    torch.manual_seed(7)
    torch.randn(1 + step)


def recomputed() -> None:
    training = Training()
    model = training.model
    training.model = nn.Sequential(nn.Identity())
    for step in range(STEPS):
        inputs, classes = own_batch(step)
        training.optimizer.zero_grad()
        outputs = checkpoint(model, inputs, use_reentrant=False)
        cross_entropy(outputs, classes).backward()
        training.optimizer.step()


def recomputed_by_a_seed_of_its_own() -> None:
    """Take two gradients a step with the same numbers, as is done at moved weights."""
    training = Training()
    for step in range(STEPS):
        for _ in range(2):
            torch.manual_seed(step)
            training.optimizer.zero_grad()
            training.backward(own_batch(step))
        training.optimizer.step()


def sampler(
    *,
    shuffle: bool = True,
    batches: int = BATCHES,
    kind: type[DistributedSampler[int]] = DistributedSampler,
) -> DistributedSampler[int]:
    """Return the first of two ranks' order of batches of 4."""
    inputs, classes = zip(*map(own_batch, range(batches)), strict=True)
    data = TensorDataset(torch.cat(inputs), torch.cat(classes))
    return kind(data, num_replicas=2, rank=0, shuffle=shuffle)


def loader_of(
    order: DistributedSampler[int], *, batch_size: int | None = 4, workers: int = 0
) -> DataLoader[Batch]:
    return DataLoader(
        order.dataset,
        sampler=order,
        batch_size=batch_size,
        num_workers=workers,
        persistent_workers=workers > 0,
    )


def epochs(
    order: DistributedSampler[int],
    batches: Iterable[Batch] | None = None,
    *,
    begins: Callable[[int], object] = lambda epoch: None,
    ends: Callable[[int], object] = lambda epoch: None,
    passes: int = EPOCHS,
    workers: int = 0,
) -> None:
    """Train for some epochs on a loader, or on other `batches`."""
    training = Training()
    delivered = loader_of(order, workers=workers) if batches is None else batches
    for epoch in range(passes):
        begins(epoch)
        for each in delivered:
            training.step(each)
        ends(epoch)


def searched_first() -> None:
    """Train on half of epoch 0, and begin again."""
    training, order = Training(), sampler()
    delivered = loader_of(order)
    for epoch in (0, *range(EPOCHS)):
        order.set_epoch(epoch)
        for each in islice(delivered, BATCHES if epoch else BATCHES // 2):
            training.step(each)


def each_twice() -> None:
    order = sampler()
    epochs(order, begins=lambda number: order.set_epoch(number // 2))


def given_epochs(*, workers: int = 0) -> None:
    """Train as is documented."""
    order = sampler()
    epochs(order, begins=order.set_epoch, workers=workers)


def seeds_worker(number: int) -> None:
    torch.manual_seed(7)


def seeded_in_workers() -> None:
    training, order = Training(), sampler()
    for epoch in range(EPOCHS):
        order.set_epoch(epoch)
        loader = DataLoader(
            order.dataset, sampler=order, batch_size=4, num_workers=1, worker_init_fn=seeds_worker
        )
        for each in loader:
            training.step(each)


class Repeating(DistributedSampler[int]):
    """Has an order of its own that follows from the epoch."""

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.epoch)
        return iter(torch.randperm(self.num_samples, generator=generator).tolist())


class Shuffling(DistributedSampler[int]):
    """Has an order of its own that follows from nothing else."""

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(self.num_samples).tolist())


class Singly:
    """Delivers batches of samples that a loader does not batch."""

    def __init__(self, order: DistributedSampler[int]) -> None:
        self._loader = loader_of(order, batch_size=None)

    def __iter__(self) -> Iterator[Batch]:
        samples = iter(self._loader)
        while some := list(islice(samples, 4)):
            yield torch.stack([each[0] for each in some]), torch.stack([each[1] for each in some])


def also_evaluated(*, batch_size: int = 4, by_hand: bool = False, sets: bool = True) -> None:
    """Evaluate after each epoch, by a loader whose order is always the same."""
    training, order = Training(), sampler()
    evaluation = loader_of(sampler(), batch_size=batch_size)
    own = [own_batch(step) for step in range(BATCHES)]
    delivered: Iterable[Batch] = own if by_hand else loader_of(order)
    for epoch in range(EPOCHS):
        if sets:
            order.set_epoch(epoch)
        for each in delivered:
            training.step(each)
        training.model.eval()
        for inputs, _ in evaluation:
            with torch.no_grad():
                training.model(inputs)
        training.model.train()


def in_turns() -> None:
    training, orders = Training(), (sampler(), sampler())
    loaders = [loader_of(each) for each in orders]
    for epoch in range(EPOCHS // 2):
        for each in orders:
            each.set_epoch(epoch)
        for first, second in zip(*loaders, strict=True):
            training.step(first)
            training.step(second)


def always_the_first() -> None:
    training, delivered = Training(), loader_of(sampler())
    for _ in range(STEPS):
        training.step(next(iter(delivered)))


def looked_at_first() -> None:
    """Look at a batch before each epoch, and at another one before each step."""
    order = sampler()
    delivered = loader_of(order)

    def begins(epoch: int) -> None:
        order.set_epoch(epoch)
        next(iter(delivered))

    def looking() -> Iterator[Batch]:
        for each in delivered:
            next(iter(delivered))
            yield each

    class Looking:
        def __iter__(self) -> Iterator[Batch]:
            return looking()

    epochs(order, Looking(), begins=begins)


def looked_at_afterwards() -> None:
    """Train on what no loader delivers, too, after a look at a batch of the pass before."""
    training, order = Training(), sampler()
    delivered = loader_of(order)
    for epoch in range(EPOCHS):
        order.set_epoch(epoch)
        for each in delivered:
            training.step(each)
        next(iter(delivered))
        for step in range(BATCHES):
            training.step(own_batch(step))


def given_seeds() -> None:
    order = sampler()
    epochs(order, begins=lambda epoch: setattr(order, "seed", epoch))


def shuffled(
    begins: Callable[[int], object],
    *,
    workers: int = 0,
    made_again: bool = False,
    generator: Callable[[], torch.Generator | None] = lambda: None,
    parts: int = 1,
    trials: bool = False,
    kept: bool = False,
    passes: int = EPOCHS,
) -> None:
    """Train on batches in random orders; begins: called with the number of each epoch.

    made_again: the loader is, in each epoch. parts: batches of a step. trials: each epoch is one,
    of an optimizer of its own. kept: all of these are.
    """
    training, data = Training(), sampler().dataset
    optimizers = [training.optimizer]

    def loader() -> DataLoader[Batch]:
        kept = workers > 0 and not made_again
        return DataLoader(
            data, 8, True, num_workers=workers, persistent_workers=kept, generator=generator()
        )

    delivered = loader()
    for epoch in range(passes * parts):
        if trials:
            training.optimizer = torch.optim.SGD(training.model.parameters(), lr=0.05)
        if kept:
            optimizers.append(training.optimizer)
        begins(epoch)
        batches = iter(loader() if made_again else delivered)
        while some := list(islice(batches, parts)):
            training.step(*some)


def same_seed(epoch: int) -> None:
    torch.manual_seed(7)


def seeded_generator() -> torch.Generator:
    return torch.Generator().manual_seed(7)


def samplers_made_again(
    *, sets: bool = False, kept: bool = False, shuffle: bool = True, trials: bool = False
) -> None:
    """Train by a sampler of each epoch; kept: all are, each for a purpose of its own."""
    training, data, all_kept = Training(), sampler().dataset, []
    for epoch in range(EPOCHS):
        if trials:
            training.optimizer = torch.optim.SGD(training.model.parameters(), lr=0.05)
        order: DistributedSampler[int]
        order = DistributedSampler(data, num_replicas=2, rank=0, shuffle=shuffle)
        if sets:
            order.set_epoch(epoch)
        if kept:
            all_kept.append(order)
        for each in loader_of(order):
            training.step(each)


def trials_of_one_pass() -> None:
    """Train from new weights in each pass, in the order of one epoch."""
    delivered = loader_of(sampler())
    for _ in range(EPOCHS):
        training = Training()
        for each in delivered:
            training.step(each)


def rolled_back(order: RandomSampler | DistributedSampler[int] | None = None) -> None:
    """Begin each pass from the same weights and random numbers."""
    training, data = Training(), sampler().dataset
    delivered = DataLoader(data, 4 if order else 8, shuffle=order is None, sampler=order)
    weights, numbers = deepcopy(training.model.state_dict()), torch.get_rng_state()
    for _ in range(EPOCHS):
        training.model.load_state_dict(weights)
        torch.set_rng_state(numbers)
        for each in delivered:
            training.step(each)


def each_thrice() -> None:
    """Go through each epoch three times, but for the one that a checkpoint has left."""
    order = sampler()
    epochs(order, begins=lambda number: order.set_epoch((number + 1) // 3))


def next_to_others() -> None:
    """Train on random orders, and look at a batch of other data, in one order, at each step."""
    training, data, others = Training(), sampler().dataset, sampler().dataset
    for _ in range(EPOCHS):
        looked_at = DataLoader(others, 8, shuffle=True, generator=seeded_generator())
        for each, (inputs, _) in zip(DataLoader(data, 8, shuffle=True), looked_at, strict=True):
            with torch.no_grad():
                training.model(inputs)
            training.step(each)


def one_sample() -> None:
    training, (inputs, classes) = Training(), own_batch(0)
    data = TensorDataset(inputs[:1], classes[:1])
    order = RandomSampler(data, num_samples=STEPS // EPOCHS, generator=seeded_generator())
    for _ in range(EPOCHS):
        for each in DataLoader(data, sampler=order):
            training.step(each)


class PartOfBatches(BatchSampler):
    """Has batches of another sampler of batches, and no sampler, as Accelerate's parts of one."""

    def __init__(self, batch_sampler: BatchSampler) -> None:
        self.batch_sampler = batch_sampler

    def __iter__(self) -> Iterator[list[int]]:
        return islice(self.batch_sampler, 0, None, 2)

    def __len__(self) -> int:
        return len(self.batch_sampler) // 2


def in_parts(begins: Callable[[int], object]) -> None:
    training, data = Training(), sampler().dataset
    order = RandomSampler(range(8 * BATCHES))
    batches = PartOfBatches(BatchSampler(order, 4, drop_last=False))
    delivered = DataLoader(data, batch_sampler=batches)
    for epoch in range(EPOCHS):
        begins(epoch)
        for each in delivered:
            training.step(each)


def of_a_list() -> None:
    """Nothing refers weakly to a list, nor to the counter in the place of fastai's sampler."""
    order = [[first, first + 1] for first in range(0, 2 * STEPS, 2)]
    epochs(sampler(), DataLoader(sampler(batches=STEPS).dataset, batch_sampler=order), passes=1)


def looked_through(epoch: int, data: TensorDataset) -> None:
    """Go through the data in one random order, without a step."""
    with torch.random.fork_rng():
        torch.manual_seed(7)
        for _ in DataLoader(data, 4, shuffle=True):
            pass


def also_looked_through() -> None:
    data = TensorDataset(*own_batch(0))
    shuffled(lambda epoch: looked_through(epoch, data))


SEEDS: dict[str, Loop] = {
    "the same on each step": partial(seeded, lambda step: torch.manual_seed(7)),
    "the same, by a name of before": partial(seeded, lambda step: manual_seed(7)),
    "the same, by another name": partial(seeded, seeded_under_another_name),
    "the same as before the run": partial(seeded, lambda step: torch.manual_seed(0)),
    "the same after each step": seeded_after_each_step,
    "the same for noise": seeded_for_noise,
    "the same for each part of a step": partial(accumulated, seed=lambda step, part: 7),
    "the same for the parts of each step": partial(accumulated, seed=lambda step, part: part),
}
PASSES: dict[str, Loop] = {
    "of the same epoch": lambda: epochs(sampler()),
    "of the same epoch, with workers": lambda: epochs(sampler(), workers=2),
    "of the same epoch, by a derived sampler": lambda: epochs(sampler(kind=Repeating)),
    "of the same epoch, in batches of the script": lambda: epochs(
        order := sampler(), Singly(order)
    ),
    "of the same epoch, evaluated": partial(also_evaluated, sets=False),
    "of the same epoch, by samplers made again": samplers_made_again,
    "of one seed": partial(shuffled, same_seed),
    # As they are made for the first pass they draw a number, too.
    "of one seed, with workers": partial(shuffled, same_seed, workers=2, passes=EPOCHS + 1),
    "of one seed, with loaders made again": partial(shuffled, same_seed, made_again=True),
    "of one seed, of workers made again": partial(shuffled, same_seed, workers=1, made_again=True),
    "of one seed, in steps of parts": partial(shuffled, same_seed, parts=2),
    "of one seed, in parts of batches": partial(in_parts, same_seed),
    "of generators made again": partial(
        shuffled, lambda epoch: None, made_again=True, generator=seeded_generator
    ),
}
HEALTHY: dict[str, Loop] = {
    "a seed that follows the step": partial(seeded, torch.manual_seed),
    "a seed that follows the step, in parts": partial(accumulated, seed=lambda step, part: step),
    "a seed for each epoch": partial(seeded, lambda step: step % BATCHES or torch.manual_seed(7)),
    "a seed before the run": seeded_as_before_the_run,
    "a seed without numbers": partial(seeded, lambda step: torch.manual_seed(7), dropout=0.0),
    "a seed, and another count of numbers": partial(seeded, of_varied_length),
    "a seed for two gradients": recomputed_by_a_seed_of_its_own,
    "samples apart": partial(seeded, samples_apart),
    "samples apart, by the run's seed": partial(restores_what_is_not_drawn, samples_of_the_run),
    "samples apart, by hand": partial(restores_what_is_not_drawn, restores_by_hand),
    "samples apart, unseen": partial(restores_what_is_not_drawn, restores_the_generator),
    "seeds in workers": seeded_in_workers,
    "activations recomputed": recomputed,
    "an epoch each": given_epochs,
    "an epoch each, with workers": partial(given_epochs, workers=2),
    "an epoch each, in turns": in_turns,
    "a seed of the sampler each": given_seeds,
    "evaluated in the same order": also_evaluated,
    "evaluated in the same order, trained by hand": partial(also_evaluated, by_hand=True),
    "evaluated in one batch, trained by hand": partial(also_evaluated, batch_size=24, by_hand=True),
    "an order on purpose": lambda: epochs(sampler(shuffle=False)),
    "an order of its own": lambda: epochs(sampler(kind=Shuffling)),
    "one pass": lambda: epochs(sampler(batches=STEPS), passes=1),
    "the first batch of each pass": always_the_first,
    "batches looked at": looked_at_first,
    "a batch looked at after each pass": looked_at_afterwards,
    "the rate searched before the first epoch": searched_first,
    "each epoch twice": each_twice,
    "each epoch three times": each_thrice,
    "trials of one pass": trials_of_one_pass,
    "weights loaded before each pass": lambda: rolled_back(sampler()),
    "samplers made again, given their epochs": partial(samplers_made_again, sets=True),
    "samplers made again, and kept": partial(samplers_made_again, kept=True),
    "samplers made again, without an order": partial(samplers_made_again, shuffle=False),
    "samplers made again, for trials": partial(samplers_made_again, trials=True),
    "random orders": partial(shuffled, lambda epoch: None),
    "random orders, with workers": partial(shuffled, lambda epoch: None, workers=2),
    "random orders, of loaders made again": partial(shuffled, lambda epoch: None, made_again=True),
    "random orders, each of its seed": partial(shuffled, torch.manual_seed),
    "random orders, of a generator": partial(
        shuffled, lambda epoch: None, generator=seeded_generator
    ),
    "random orders, one seed for each of some trials": partial(shuffled, same_seed, trials=True),
    "random orders, one seed for each of some trials, kept": partial(
        shuffled, same_seed, trials=True, kept=True
    ),
    "random orders, weights loaded before each pass": rolled_back,
    "random orders, next to the same batches": next_to_others,
    "random orders, of one sample": one_sample,
    "random orders, in parts of batches": partial(in_parts, lambda epoch: None),
    "random orders, and one to look through": also_looked_through,
    "batches of a list": of_a_list,
}
LOOPS: dict[str, tuple[Loop, str | None]] = {
    **{f"seeds {name}": (loop, SEED_REPEATED) for name, loop in SEEDS.items()},
    **{f"passes {name}": (loop, EPOCH_REPEATED) for name, loop in PASSES.items()},
    **{name: (loop, None) for name, loop in HEALTHY.items()},
}


def flagged(watch, loop: Loop) -> dict[str, list[bool]]:
    """Run a loop, and return for each column which steps it marks."""
    torch.manual_seed(0)
    watched = watch()
    loop()
    watched.probe.flush()
    ring = watched.read(one_schema=False)
    assert ring.state.probe_errors == 0
    assert len(ring.records) >= STEPS
    rows = [
        dict(zip(schema.step_columns, record.values.tolist(), strict=True))
        for record, schema in zip(ring.records, ring.record_schemas, strict=True)
    ]
    return {name: [row[name] > 0.0 for row in rows] for name in _COLUMNS}


def longest(flags: Iterable[bool]) -> int:
    best = count = 0
    for flag in flags:
        count = count + 1 if flag else 0
        best = max(best, count)
    return best


@pytest.mark.parametrize("name", LOOPS)
def test_steps_show_what_they_repeat_and_nothing_else(watch, name):
    loop, column = LOOPS[name]
    found = flagged(watch, loop)
    assert {each for each, flags in found.items() if any(flags)} == ({column} - {None})
    if column is not None:
        assert longest(found[column]) >= _LONG


def test_one_step_that_sets_another_seed_is_not_one_that_repeats(watch):
    found = flagged(watch, lambda: seeded(lambda step: torch.manual_seed(7 + (step == 20))))
    steps = found[SEED_REPEATED]
    assert [step for step, flag in enumerate(steps) if not flag] == [0, 1, 20, 21]


def test_an_epoch_is_repeated_from_its_third_pass_on(watch):
    found = flagged(watch, lambda: epochs(sampler()))
    assert found[EPOCH_REPEATED] == [False] * 2 * BATCHES + [True] * BATCHES * (EPOCHS - 2)


@pytest.mark.parametrize("module", ["torch", "torch.random"])
def test_seeds_are_seen_where_torch_has_no_function_for_all_of_them(watch, monkeypatch, module):
    def plain(seed: int) -> torch.Generator:
        return torch.default_generator.manual_seed(seed)

    wrapped = _disable_dynamo(plain)  # as importing torch._dynamo does
    monkeypatch.delattr(torch.random, "_manual_seed_impl", raising=False)
    monkeypatch.setattr(torch.random, "manual_seed", plain)
    monkeypatch.setattr(torch, "manual_seed", wrapped)

    def seeds(step: int) -> None:
        (wrapped if module == "torch" else torch.random.manual_seed)(7)

    assert longest(flagged(watch, lambda: seeded(seeds))[SEED_REPEATED]) >= _LONG


def test_nothing_stays_in_the_place_of_torchs_functions(watch):
    names = ("manual_seed", "set_rng_state", "_manual_seed_impl")
    before = [getattr(module, name, None) for module in (torch, torch.random) for name in names]
    watch().probe.detach()
    after = [getattr(module, name, None) for module in (torch, torch.random) for name in names]
    assert after == before
