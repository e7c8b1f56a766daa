"""Batches that repeat, on steps or ranks, and ranks of odd data are found live; twins are not."""

import itertools
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    TensorDataset,
    get_worker_info,
)
from torch.utils.data.distributed import DistributedSampler

from mp_agent.alerting.conditions import batches
from mp_agent.node.run.run import Run
from mp_agent.ring import locations, reader
from mp_agent.settings import Settings
from tests.agent.node.shown import shown
from tests.agent.probe.ranks import run_ranks
from tests.agent.probe.rings import make_identity
from tests.agent.probe.watching import watched
from tests.gloo import process_group

STEPS, STEPS_PER_POLL, STEP_SECONDS = 112, 8, 5
ONSET = 40
"""Step from which on something is wrong that was right before."""
LATE = 100
WITHIN_STEPS = 64
RANKS = 2
_LOOKED_AT = (
    *(batches.SAME_BATCH, batches.WORKERS_REPEAT_BATCHES, batches.RANKS_SHARE_BATCHES),
    *(batches.SINGLE_ROW_BATCH, *batches.OF_RANK_LOSSES),
)
OURS = [condition.name for condition in _LOOKED_AT]
SAME, DOUBLED, SHARED, SINGLE, OUTLIERS, UNLIKE = OURS

Batch = tuple[torch.Tensor, torch.Tensor]


def samples(count: int = 256, seed: int = 0) -> TensorDataset:
    """Return token ids [N, 6], and classes that follow from them."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 50, (count, 6), generator=generator)
    return TensorDataset(ids, ids.sum(1) % 4)


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(50, 8), nn.Flatten(), nn.Linear(48, 4))


class Stream(IterableDataset[Batch]):
    """Samples one after the other; divided: each worker takes its part of them."""

    def __init__(self, *, divided: bool) -> None:
        self._divided = divided

    def __iter__(self) -> Iterator[Batch]:
        data, worker = samples(10**4), get_worker_info()
        first, step = (worker.id, worker.num_workers) if worker and self._divided else (0, 1)
        return (data[place] for place in range(first, len(data), step))


class SameItem(Dataset[Batch]):
    """A dataset that has forgotten its index."""

    def __init__(self) -> None:
        self._samples = samples()

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> Batch:
        ids, classes = self._samples[0]
        return ids, classes


def forever(loader) -> Iterator[Batch]:
    while True:
        yield from loader


def first_batch_each_time() -> Iterator[Batch]:
    loader = DataLoader(samples(), batch_size=8)
    while True:
        yield next(iter(loader))


def streamed(*, divided: bool) -> Iterator[Batch]:
    return forever(DataLoader(Stream(divided=divided), batch_size=8, num_workers=2))


def overfitted() -> Iterator[Batch]:
    return itertools.repeat(next(iter(DataLoader(samples(), batch_size=8))))


def drawn(stuck_from: int = 10**6) -> Iterator[Batch]:
    """Draw batches without a loader; from a step on the generator is seeded for each."""
    data, generator = samples(), torch.Generator().manual_seed(1)
    for step in itertools.count():
        if step >= stuck_from:
            generator.manual_seed(1)
        chosen = torch.randint(0, 256, (8,), generator=generator)
        yield data.tensors[0][chosen], data.tensors[1][chosen]


def full_batch(loader: bool) -> Iterator[Batch]:
    data = samples(32)
    if loader:
        return forever(DataLoader(data, batch_size=32))
    return itertools.repeat((data.tensors[0], data.tensors[1]))


class Counting(DataLoader[Batch]):
    """A loader whose batches a counter numbers, as fastai's, to which nothing refers weakly."""

    _index_sampler = property(lambda self: itertools.count())


class AllAtOnce(IterableDataset[Batch]):
    """One batch of all samples."""

    def __iter__(self) -> Iterator[Batch]:
        return itertools.islice(full_batch(loader=False), 1)


def epochs_over_buffers(epochs: int) -> Iterator[Batch]:
    """Train on all of a buffer several times, then on the next one, as PPO does."""
    for number in itertools.count():
        ids, classes = samples(32, seed=number).tensors
        for _ in range(epochs):
            yield ids.clone(), classes.clone()


def of_rows(rows_at: Callable[[int], int]) -> Iterator[Batch]:
    for step in itertools.count():
        ids, classes = samples(rows_at(step), seed=step).tensors
        yield ids, classes


def each_twice() -> Iterator[Batch]:
    for batch in forever(DataLoader(samples(), batch_size=8, shuffle=True)):
        yield batch
        yield batch


MISTAKES = {
    "next(iter(loader))": (first_batch_each_time, SAME, 0),
    "the same item": (lambda: forever(DataLoader(SameItem(), batch_size=8)), SAME, 0),
    "one batch": (overfitted, SAME, 0),
    "a stream that each worker reads": (lambda: streamed(divided=False), DOUBLED, 0),
    "a stuck generator": (lambda: drawn(ONSET), SAME, ONSET),
    "single rows": (
        lambda: of_rows(lambda step: 8 if step < LATE else 1),
        SINGLE,
        LATE,
    ),
}
HEALTHY = {
    "a loader": lambda: forever(DataLoader(samples(), batch_size=8)),
    "an epoch of thirteen batches": lambda: forever(DataLoader(samples(208), batch_size=16)),
    "a stream that workers divide": lambda: streamed(divided=True),
    "an epoch of two batches": lambda: forever(DataLoader(samples(16), batch_size=8)),
    "drawn": drawn,
    "all at once": lambda: full_batch(loader=False),
    "all at once from a loader": lambda: full_batch(loader=True),
    "all at once from a loader that counts": lambda: forever(
        Counting(AllAtOnce(), batch_size=None)
    ),
    "epochs over buffers": lambda: epochs_over_buffers(10),
    "each batch twice": each_twice,
    "a last batch of one": lambda: forever(DataLoader(samples(33), batch_size=8)),
    "varying rows": lambda: of_rows(lambda step: 1 + step * 7 % 9),
    "rows of one": lambda: of_rows(lambda step: 1),
}


def train(batches: Iterator[Batch], steps: int, acts_from: int | None = None) -> Iterator[int]:
    """Train, and yield the number of each step.

    acts_from: from which step on the model acts on single rows before it trains, with gradients
    enabled, as that of deep Q-learning does once it explores less.
    """
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step, (ids, classes) in enumerate(itertools.islice(batches, steps)):
        if acts_from is not None and step >= acts_from:
            model(ids[:1]).argmax()
        optimizer.zero_grad()
        cross_entropy(model(ids), classes).backward()
        optimizer.step()
        yield step


def fired(run: Run) -> set[str]:
    """Return which of our alerts have fired."""
    start = "condition_fired_total{"
    names = {
        series.removeprefix(start).partition(",")[0]
        for series, count in shown(run).items()
        if series.startswith(start) and count
    }
    return names.intersection(OURS)


@pytest.fixture
def first_fired(watch, tmp_path: Path, monkeypatch) -> Callable[..., tuple[set[str], int]]:
    """Train under a node agent's run; return the alerts, and the step at which one was there."""
    # A process does not see its own locks.
    monkeypatch.setattr(reader, "is_locked", lambda fd: True)

    def found(make: Callable[[], Iterator[Batch]], steps: int, **how: int) -> tuple[set[str], int]:
        watched_here = watch()
        run_dir = locations.run_directory(tmp_path / "shm", "test")
        ring = locations.ring_path(run_dir, make_identity())
        ring.parent.mkdir(parents=True)
        ring.hardlink_to(watched_here.writer.path)
        settings = Settings(dir=tmp_path / "shm", flight_dir=tmp_path / "flight")
        first = 0
        with closing(Run(run_dir, settings)) as run:
            for step in train(make(), steps, **how):
                if step % STEPS_PER_POLL == 0:
                    run.poll(step * STEP_SECONDS)
                    first = first or (step if fired(run) else 0)
            run.poll(steps * STEP_SECONDS)
            assert watched_here.state().probe_errors == 0
            return fired(run), first

    return found


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_found_within_steps_of_its_onset(first_fired, name):
    make, alert, onset = MISTAKES[name]
    alerts, step = first_fired(make, onset + STEPS)
    assert alerts == {alert}
    assert onset < step <= onset + WITHIN_STEPS


@pytest.mark.parametrize("name", HEALTHY)
def test_nothing_is_found_in_healthy_batches(first_fired, name):
    assert first_fired(HEALTHY[name], 2 * STEPS)[0] == set()


def test_single_rows_that_a_model_acts_on_are_no_batches(first_fired):
    assert first_fired(drawn, 2 * STEPS, acts_from=ONSET)[0] == set()


def test_a_batch_that_repeats_is_found_while_the_model_acts(first_fired):
    assert first_fired(lambda: drawn(ONSET), ONSET + STEPS, acts_from=0)[0] == {SAME}


def of_rank(case: str, rank: int) -> Iterator[Batch]:
    """Return the batches of one rank."""
    if case == "no sampler":
        return forever(DataLoader(samples(), batch_size=8))
    if case == "all at once on each rank" or (case == "one batch on one rank" and rank):
        ids, classes = samples(32, seed=rank).tensors
        return ((ids.clone(), classes) for _ in itertools.count())
    if case in ("one seed", "one batch on one rank"):
        return drawn()
    sampler: DistributedSampler[Batch] = DistributedSampler(samples(), RANKS, rank)
    if case == "a sampler":
        return forever(DataLoader(samples(), batch_size=8, sampler=sampler))
    if case == "single rows on one rank":
        return forever(DataLoader(samples(), batch_size=1 if rank else 8, sampler=sampler))
    return iter(_with_wrong_labels(case, rank))


def _with_wrong_labels(case: str, rank: int) -> Iterator[Batch]:
    """Yield batches with classes that rank 1 has at random, or wrong now and then."""
    for step in itertools.count():
        ids = samples(64, seed=2 * step + rank).tensors[0]
        classes = ids[:, 0] % 4
        if rank == 1 and case == "wrong labels":
            classes = classes[torch.randperm(64)]
        elif rank == 1 and case == "odd batches" and step % 9 == 4:
            classes = (classes + 1) % 4
        yield ids, classes


OF_RANKS = {
    "no sampler": {SHARED},
    "one seed": {SHARED},
    "a sampler": set(),
    "one batch on one rank": {SAME},
    "all at once on each rank": set(),
    "single rows on one rank": {SINGLE},
    "right labels": set(),
    "odd batches": {OUTLIERS},
    "wrong labels": {UNLIKE},
}


def train_ranks(rank: int, directory: Path) -> None:
    with process_group(directory, rank, RANKS):
        for case in OF_RANKS:
            with watched(directory / case, rank, RANKS):
                _train_wrapped(case, rank)


def _train_wrapped(case: str, rank: int) -> None:
    model = DistributedDataParallel(make_model())
    labelled = "labels" in case or case == "odd batches"
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05 if labelled else 0.001)
    for ids, classes in itertools.islice(of_rank(case, rank), 200 if labelled else STEPS):
        optimizer.zero_grad()
        cross_entropy(model(ids), classes).backward()
        optimizer.step()


@pytest.fixture(scope="module")
def rings(tmp_path_factory):
    directory = tmp_path_factory.mktemp("ranks")
    run_ranks(train_ranks, directory, ranks=RANKS)
    return directory


@pytest.mark.slow
@pytest.mark.parametrize("case", OF_RANKS)
def test_ranks_of_the_same_or_odd_data_are_found(rings, tmp_path, case):
    run_dir = locations.run_directory(tmp_path / "shm", "test")
    for rank in range(RANKS):
        ring = locations.ring_path(run_dir, make_identity(rank, RANKS))
        ring.parent.mkdir(parents=True, exist_ok=True)
        ring.hardlink_to(rings / case / f"rank{rank}.ring")
    settings = Settings(dir=tmp_path / "shm", flight_dir=tmp_path / "flight")
    with closing(Run(run_dir, settings)) as run:
        for poll in range(4):
            run.poll(float(poll))
        assert fired(run) == OF_RANKS[case]


class _Real(nn.Module):
    """Takes complex numbers, conjugates that torch has not computed among them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 4)

    def forward(self, inputs, unused):
        return self.linear(torch.view_as_real(inputs.resolve_conj()).flatten(1))


@pytest.mark.parametrize("kind", ["conj", "negative", "bool", "scalar"])
def test_batches_of_any_kind_of_number_have_a_digest(watch, kind):
    watched, model = watch(), _Real()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(34):
        inputs = torch.randn(16, 4, dtype=torch.complex64)
        extra = {
            "conj": inputs.conj(),
            "negative": inputs.conj().imag,
            "bool": inputs.real > 0,
            "scalar": torch.tensor(3),
        }[kind]
        optimizer.zero_grad()
        model(inputs, extra).square().mean().backward()
        optimizer.step()
    contents = watched.read(one_schema=False)
    assert contents.state.probe_errors == 0
    assert any(value == value for value in contents.column("batch_digest"))


def test_batches_have_a_digest_where_another_model_steps_in_between(watch):
    watched, model, critic = watch(), make_model(), nn.Linear(3, 1)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.01) for each in (model, critic)]
    for _ in range(40):
        for part, inputs in ((model, torch.randint(0, 50, (8, 6))), (critic, torch.randn(2, 3))):
            part.zero_grad()
            part(inputs).square().mean().backward()
            optimizers[part is critic].step()
    contents = watched.read(one_schema=False)
    digests = contents.column("batch_digest")
    assert [step for step, each in enumerate(digests, 1) if each == each] == [
        13,
        14,
        26,
        27,
        39,
        40,
    ]
    assert contents.state.probe_errors == 0
