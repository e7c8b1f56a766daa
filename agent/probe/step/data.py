"""What a step begins with: batches of a pass over the data, and random numbers; whether again."""

import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import BatchSampler, IterableDataset, RandomSampler, Sampler
from torch.utils.data.distributed import DistributedSampler

from mp_agent.probe import accelerator
from mp_agent.ring.interruptions import pass_on


@dataclass(slots=True)
class _Pass:
    """A pass over the data in an order that follows from an epoch, or from random numbers."""

    iterator: weakref.ref[Any]
    sampler: weakref.ref[Any]
    order: Hashable
    """What it follows from."""
    repeats: bool
    """The passes before were trained with in this order too, two or more."""
    sequence: int
    """Step in which it began."""
    batches: int = 0
    """Batches that were trained with so far."""
    is_noted: bool = False
    """The run was found to have stepped within it."""


@dataclass(frozen=True, slots=True)
class _Trained:
    """A pass that was trained with: over which data, by which sampler, and by which optimizer."""

    data: weakref.ref[Any]
    sampler: weakref.ref[Any]
    optimizer: weakref.ref[Any]
    order: Hashable


class Loaders:
    """What data loaders have delivered to train on, those with more than one batch.

    Of a `DistributedSampler` that shuffles, the passes over the data too: `set_epoch` gives each an
    order of its own. A pass counts once two of its batches were each followed by a backward: of one
    that is only looked at, or evaluated by, at most the last one is. Two passes in one order are
    no mistake: a search of the learning rate comes before the first epoch, and some methods go
    through each epoch twice. Nor are more of them once an epoch has had another order, or where
    each is of another optimizer, or begins with weights that were loaded: searches, rollbacks and
    trials are to have the same order.

    So do the passes of samplers that are made again in each epoch, and those of a `RandomSampler`
    which begin with the same random numbers, as where each epoch sets the seed. Those count once
    the run has stepped within them.
    """

    def __init__(
        self,
        on_shuffled: Callable[[], None] = lambda: None,
        sequence: Callable[[], int] = lambda: 0,
        optimizer: Callable[[], object] = lambda: None,
    ) -> None:
        """on_shuffled: called when such a pass begins; from then on `backward_begins` is needed.

        Of a `RandomSampler`, when one repeats. sequence: returns the number of the step under way.
        optimizer: returns the one that has stepped the run's weights last.
        """
        self._on_shuffled = on_shuffled
        self._sequence = sequence
        self._optimizer = optimizer
        self._several: weakref.WeakKeyDictionary[object, bool] = weakref.WeakKeyDictionary()
        """By iterator, whether there is more than one batch; samplers may be plain lists."""
        self.delivered = 0
        """Batches of such loaders."""
        self.from_workers = False
        """Whether the last one is of a stream that several workers read."""
        self._passes: dict[int, _Pass] = {}
        """By `id` of the iterator."""
        self._trained: weakref.WeakKeyDictionary[object, list[object]] = weakref.WeakKeyDictionary()
        """By sampler, the orders of the last passes that were trained with, and the optimizer."""
        self._of_run: list[_Trained] = []
        """The last passes that the run has stepped within."""
        self._latest: _Pass | None = None
        """That of the last batch."""
        self._loaded = False
        """There was a batch since the last backward."""
        self._side_by_side: weakref.WeakKeyDictionary[object, bool] = weakref.WeakKeyDictionary()
        """By iterator with batches since then, whether its pass repeats others.

        That of an evaluation is gone with its loop.
        """

    def weights_loaded(self) -> None:
        """Start over: the run goes on from weights of before, or is another one."""
        self._trained.clear()
        self._of_run.clear()
        for each in self._passes.values():
            each.repeats = False

    def loads(self, iterator: Any) -> None:
        """Count a batch of an iterator over a loader."""
        sampler = iterator._index_sampler
        if iterator not in self._several:
            self._several[iterator] = _has_several(sampler)
        self.delivered += self._several[iterator]
        several_workers = iterator._num_workers > 1
        self.from_workers = several_workers and isinstance(iterator._dataset, IterableDataset)
        if iterator._num_yielded == 0:
            self._begin_pass(iterator, sampler)
        self._latest = found = self._passes.get(id(iterator))
        self._loaded = True
        self._side_by_side[iterator] = found is not None and found.repeats
        if found is not None and not found.is_noted:
            self._note_trained(found, iterator._dataset)

    def backward_begins(self) -> bool:
        """Return whether what the run trains with now comes in an order that it had before.

        Of loaders that deliver side by side, which one it trains with is not known.
        """
        found, loaded, self._loaded = self._latest, self._loaded, False
        repeats = all(self._side_by_side.values())
        self._side_by_side.clear()
        if found is None:
            return False
        found.batches += loaded
        if found.batches == 2 and (sampler := found.sampler()) is not None:
            latest = self._trained.get(sampler, [])[1 - _PASSES_AT_MOST :]
            self._trained[sampler] = [*latest, self._by_optimizer(found.order)]
        return repeats and found.repeats and (loaded or found.batches > 1)

    def _by_optimizer(self, order: Hashable) -> object:
        optimizer = self._optimizer()
        return order, None if optimizer is None else weakref.ref(optimizer)

    def _begin_pass(self, iterator: Any, index_sampler: Any) -> None:
        self._passes.pop(id(iterator), None)  # workers that persist keep their iterator
        sampler: Any = index_sampler
        if isinstance(sampler, BatchSampler):
            sampler = getattr(sampler, "batch_sampler", sampler)  # Accelerate's part of one
            sampler = getattr(sampler, "sampler", None)
        if (order := _order_of(sampler, iterator)) is None:
            return
        of_epoch = isinstance(sampler, DistributedSampler)
        trained = self._trained.get(sampler, []) if of_epoch else []
        repeats = _are_alike(trained, self._by_optimizer(order))
        repeats = repeats or self._repeats(_referable(iterator._dataset, sampler), sampler, order)
        self._passes = {each: own for each, own in self._passes.items() if own.iterator()}
        self._passes[id(iterator)] = _Pass(
            weakref.ref(iterator), weakref.ref(sampler), order, repeats, self._sequence()
        )
        if of_epoch or repeats:
            self._on_shuffled()

    def _repeats(self, data: object, sampler: object, order: Hashable) -> bool:
        """Return whether the run has stepped in passes over these data in this order alone.

        Of samplers that are all there, each is for a purpose of its own.
        """
        if (optimizer := self._optimizer()) is None:
            return False
        of_data = [each for each in self._of_run if each.data() is data]
        own = all(each.sampler() in (None, sampler) for each in of_data[-2:])
        orders = [(each.order, each.optimizer()) for each in of_data]
        return own and _are_alike(orders, (order, optimizer))

    def _note_trained(self, found: _Pass, data: Any) -> None:
        """Remember a pass of which the batches of at least two steps were delivered."""
        if self._sequence() <= found.sequence + 1:
            return
        found.is_noted = True
        optimizer, sampler = self._optimizer(), found.sampler()
        if optimizer is None or sampler is None:
            return
        over = weakref.ref(_referable(data, sampler))
        self._of_run = [each for each in self._of_run if each.data() is not None]
        self._of_run = [
            *self._of_run[1 - _PASSES_AT_MOST :],
            _Trained(over, found.sampler, weakref.ref(optimizer), found.order),
        ]


_PASSES_AT_MOST = 16


def _are_alike(passes: Sequence[object], one: object) -> bool:
    """Return whether two passes or more are like `one`, all but the first, which may be a trial.

    Or come before what sets the seed of each pass from then on, as an evaluation does.
    """
    return passes[-2:] == [one, one] and all(each == one for each in passes[1:])


def _referable(data: Any, sampler: Any) -> Any:
    """Return the data, or the sampler where nothing refers weakly to these, such as a list."""
    return data if type(data).__weakrefoffset__ else sampler


def _order_of(sampler: Any, iterator: Any) -> Hashable:
    """Return what the order of a pass follows from, before its first batch; None: not known."""
    if isinstance(sampler, DistributedSampler) and _follows_epoch(sampler):
        part = [getattr(sampler, name, None) for name in ("num_replicas", "rank", "num_samples")]
        return type(sampler), *part, getattr(sampler, "seed", 0), sampler.epoch
    if type(sampler) is not RandomSampler or len(sampler.data_source) < 2:
        return None
    if (generator := sampler.generator) is None:
        # Workers have taken the order already, and the script may have set a seed since: what the
        # iterator drew right before counts as well.
        return iterator._base_seed, _digest(torch.default_generator), len(sampler)
    return (_digest(generator), len(sampler)) if generator.device.type == "cpu" else None


def _digest(generator: torch.Generator) -> int:
    return hash(generator.get_state().numpy().tobytes())


def _has_several(sampler: Any) -> bool:
    try:
        return len(sampler) > 1
    except Exception as error:
        pass_on(error)
        # That of a stream has no length. Of fastai's counter nothing follows: it may be one batch.
        return isinstance(sampler, Sampler)


def _follows_epoch(sampler: DistributedSampler[Any]) -> bool:
    """Return whether the order is that of the epoch; a derived class may have another source."""
    code = getattr(type(sampler).__iter__, "__code__", None)
    shuffles = bool(getattr(sampler, "shuffle", False))
    return shuffles and code is not None and "epoch" in code.co_names


class Seeds:
    """Finds steps that set the seed of the step before, and draw as many numbers until backward."""

    def __init__(self, on_seed: Callable[[], None]) -> None:
        """on_seed: called when a seed is set; from then on `backward_begins` is needed."""
        self._on_seed = on_seed
        self._given: tuple[int, Hashable] | None = None
        """The seed that was set since the last backward, and what it began with."""
        self._before: tuple[int, Hashable] | None = None
        """The last step that has drawn numbers of such a seed, and where they will go on."""
        self._sequence = 0

    def numbers_set(self, *, seeded: bool) -> None:
        """Note that a seed was set, or an earlier state restored, as around what is drawn apart."""
        self._given = None
        if seeded:
            self._given = torch.default_generator.initial_seed(), accelerator.random_state()
            self._on_seed()

    def backward_begins(self, sequence: int) -> bool:
        """Return whether step `sequence` has begun with the numbers of the step before."""
        given, self._given = self._given, None
        if sequence == self._sequence:
            return False
        self._sequence = sequence
        before, self._before = self._before, None
        if given is None or torch.default_generator.initial_seed() != given[0]:
            return False
        if (now := accelerator.random_state()) == given[1]:
            return False
        self._before = sequence, now
        return before == (sequence - 1, now)
