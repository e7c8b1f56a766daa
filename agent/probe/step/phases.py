"""Phases of a rank, and parts of a step: when each began, and how long it took.

Next to them, what a step begins with: batches of a pass over the data, and random numbers.
"""

import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from math import isnan, nan
from threading import get_ident
from time import perf_counter
from typing import Any

import torch
from torch.utils.data import BatchSampler, IterableDataset, RandomSampler
from torch.utils.data.distributed import DistributedSampler

from mp_agent.probe import accelerator
from mp_agent.records.steps import Phase
from mp_agent.ring.interruptions import pass_on
from mp_agent.ring.writer import RingWriter


class StepPart(Enum):
    """What the loop is doing, with the column that its time is added to."""

    BETWEEN = ""
    """Between passes or steps: data if a forward follows, otherwise no part."""
    DATA = "data_seconds"
    FORWARD = "forward_seconds"
    BACKWARD = "backward_seconds"
    OPTIMIZER = "optimizer_seconds"


OTHER = "other_seconds"
"""Column of what is left of the step's time."""


class StepParts:
    """Adds up the parts of the step under way, over its passes. No part is known that is not seen.

    `forward_begins` is called from the training thread or another one, the rest from the former.
    """

    def __init__(self, *, on: bool = True) -> None:
        """on: whether anything is timed."""
        self._on = on
        self._current = StepPart.BETWEEN
        self._since_seconds = nan
        self._between_seconds = 0.0
        """Between passes or steps, before what is not training began."""
        self._seconds: dict[StepPart, float] = {}
        self._unknown: set[StepPart] = set()
        """Parts of this step of which some was not seen."""
        self._forward_seen = False
        """Since an optimizer has stepped."""
        self._not_training = False
        self._within_step = False
        """The backward that ended last was in an optimizer's closure."""
        self._thread: int | None = None

    @property
    def awaits_forward(self) -> bool:
        """Whether a forward of the model would begin the forward part."""
        return self._current in (StepPart.BETWEEN, StepPart.OPTIMIZER) and not self._not_training

    def forward_begins(self) -> None:
        """Count what went on since the last pass or step as data, if this thread trains the run."""
        if not self.awaits_forward or get_ident() != self._thread:
            return
        if self._current is StepPart.OPTIMIZER and not self._within_step:
            self._since_seconds = perf_counter()  # there was no step, and loading began unseen
        self._enter(StepPart.FORWARD)
        self._forward_seen = True

    def backward_begins(self) -> None:
        """End the forward part; if it was not seen, neither it nor data can be known."""
        if not self._on:
            return
        if not self._forward_seen:
            self._unknown.update((StepPart.DATA, StepPart.FORWARD))
        self._enter(StepPart.BACKWARD)

    def backward_ended(self, *, within_step: bool) -> None:
        """End backward. within_step: it was in the closure of an optimizer that is stepping."""
        if not self._on:
            return
        self._within_step = within_step
        self._enter(StepPart.OPTIMIZER if within_step else StepPart.BETWEEN)

    def optimizer_begins(self) -> None:
        """Begin the optimizer part, unless it has begun."""
        if not self._on:
            return
        if self._current is StepPart.FORWARD:
            self._unknown.add(StepPart.FORWARD)  # it contains a backward that was not seen
        if self._current is not StepPart.OPTIMIZER:
            self._enter(StepPart.OPTIMIZER)

    def optimizer_ended(self) -> None:
        """End the optimizer part: the optimizer has stepped, or has skipped its step."""
        if not self._on:
            return
        self._enter(StepPart.BETWEEN)
        self._forward_seen = self._within_step = False

    def not_training(self, begins: bool) -> None:
        """Count nothing while the rank evaluates, saves a checkpoint or is in a named phase."""
        if begins is self._not_training:
            return
        if self._current is StepPart.BETWEEN:
            self._add_up(perf_counter())
        self._not_training = begins

    def known(self, step_seconds: float) -> Mapping[str, float]:
        """Return the parts of the step under way that are known, by column; it is about to end.

        step_seconds: its wall time; NaN on the first, of which no beginning is known.
        """
        self._add_up(perf_counter())
        known = {
            part.value: seconds
            for part, seconds in self._seconds.items()
            if part not in self._unknown and not isnan(seconds)
        }
        if not isnan(step_seconds):
            known[OTHER] = max(step_seconds - sum(known.values()), 0.0)
        return known

    def step_begins(self) -> None:
        """Start over with the next step; what the probe did since the end of the last is not it."""
        if not self._on:
            return
        self._thread = get_ident()
        self._current = StepPart.BETWEEN
        self._seconds.clear()
        self._unknown.clear()
        self._forward_seen = self._within_step = False
        self._between_seconds, self._since_seconds = 0.0, perf_counter()

    def _enter(self, part: StepPart) -> None:
        self._add_up(perf_counter())
        if part is StepPart.FORWARD and self._current is StepPart.BETWEEN:
            data_seconds = self._seconds.get(StepPart.DATA, 0.0)
            self._seconds[StepPart.DATA] = data_seconds + self._between_seconds
        self._between_seconds = 0.0
        self._current = part

    def _add_up(self, now_seconds: float) -> None:
        """Add the time since the last change to what went on."""
        seconds, self._since_seconds = now_seconds - self._since_seconds, now_seconds
        if self._current is not StepPart.BETWEEN:
            self._seconds[self._current] = self._seconds.get(self._current, 0.0) + seconds
        elif not self._not_training:
            self._between_seconds += seconds


_BY_NAME = {
    "eval": Phase.EVAL,
    "evaluation": Phase.EVAL,
    "validation": Phase.EVAL,
    "checkpoint": Phase.CHECKPOINT,
    "checkpointing": Phase.CHECKPOINT,
}


class PhaseMarks:
    """The phase of training, overridden by evaluation and saving, then by the user's phases.

    Evaluation has several signs, such as the model's mode and a stretch without gradients: it goes
    on while there is one of them, and at the latest until the next backward. That a sign is over
    may come without notice, so it is asked for as well.
    """

    def __init__(self, not_training: Callable[[bool], None] | None = None) -> None:
        """not_training: called with True as the rank leaves training, with False as it returns."""
        self._not_training = not_training
        self._writer: RingWriter | None = None
        self._training = Phase.STARTING
        self._sequence = 0
        self._raised = False
        """What the phase of training says has raised: a script may go on all the same."""
        self._signs: dict[str, Callable[[], bool]] = {}
        """Each with what says that it is over."""
        self._saves = 0
        self._entered: list[str] = []
        self._stamped: tuple[Phase, str, int] | None = None

    def stamp_into(self, writer: RingWriter) -> None:
        """Stamp into this ring from now on."""
        self._writer = writer
        self._stamped = None

    @property
    def between_steps(self) -> bool:
        """Whether training has begun and neither a backward nor an optimizer is running."""
        return self._training is Phase.FORWARD or self._raised

    @property
    def in_training(self) -> bool:
        """Whether the rank neither evaluates nor saves, nor is in a phase that the user named."""
        if over := [sign for sign, is_over in self._signs.items() if is_over()]:
            for sign in over:
                del self._signs[sign]
            self._changed()
        return not (self._entered or self._saves or self._signs)

    def training(self, phase: Phase, sequence: int) -> None:
        """Set the phase of training; it shows unless the user has named one."""
        self._training, self._sequence, self._raised = phase, sequence, False
        self._signs.clear()
        self._saves = 0
        if self._entered:
            return
        if self._not_training is not None:
            self._not_training(False)
        if self._writer is not None:
            self._stamped = phase, "", sequence
            self._writer.stamp(phase, sequence=sequence)

    def training_raised(self) -> None:
        """Stay in the phase of training, in which an exception was raised."""
        self._raised = True

    def evaluation(
        self, sign: str, begins: bool, is_over: Callable[[], bool] = lambda: False
    ) -> None:
        """Record that a sign of evaluation appears or disappears between two steps.

        is_over: says whether one that appears has disappeared since.
        """
        if not self.between_steps:
            return
        if begins:
            self._signs[sign] = is_over
        else:
            self._signs.pop(sign, None)
        self._changed()

    def saving(self, begins: bool) -> None:
        """Record that saving a checkpoint starts, or has ended."""
        self._saves = max(0, self._saves + (1 if begins else -1))
        self._changed()

    def enter(self, name: str) -> None:
        """Enter a phase that the user names."""
        self._entered.append(name)
        self._changed()

    def leave(self) -> None:
        """Return to the phase before."""
        self._entered.pop()
        self._changed()

    def _changed(self) -> None:
        in_training = self.in_training
        if self._not_training is not None:
            self._not_training(not in_training)
        self._stamp()

    def _stamp(self) -> None:
        """Stamp the phase if it has changed."""
        phase, name = self._training, ""
        if self._entered:
            phase = _BY_NAME.get(self._entered[-1].lower(), Phase.OTHER)
            name = self._entered[-1] if phase is Phase.OTHER else ""
        elif self._saves:
            phase = Phase.CHECKPOINT
        elif self._signs:
            phase = Phase.EVAL
        now = phase, name, self._sequence
        if self._writer is None or now == self._stamped:
            return
        self._stamped = now
        self._writer.stamp(phase, name=name, sequence=self._sequence)


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
        """By sampler, whether it makes more than one batch."""
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
        if sampler not in self._several:
            self._several[sampler] = _has_several(sampler)
        self.delivered += self._several[sampler]
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
    except Exception as error:  # that of a stream has no length
        pass_on(error)
        return True


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
