"""Runs two sides of a comparison by turns, from the same random state."""

import random
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from itertools import takewhile
from threading import Condition, Thread
from typing import Any

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Randomness:
    """States at one moment: torch's on the CPU and on CUDA devices, Python's and NumPy's."""

    cpu: Tensor
    cuda: tuple[Tensor, ...]
    python: tuple[Any, ...]
    numpy: dict[str, Any]

    @classmethod
    def now(cls) -> "Randomness":
        """Return the present state."""
        started = torch.cuda.is_available() and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        return cls(
            torch.get_rng_state(),
            tuple(torch.cuda.get_rng_state_all()) if started else (),
            random.getstate(),
            np.random.get_state(legacy=False),
        )

    def restore(self) -> None:
        """Make it the present state."""
        torch.set_rng_state(self.cpu)
        if self.cuda:
            torch.cuda.set_rng_state_all(list(self.cuda))
        random.setstate(self.python)
        np.random.set_state(self.numpy)


REFERENCE, CANDIDATE = 0, 1
Body = Callable[[], None]


@dataclass(slots=True)
class SideEvent:
    """Where a side stopped: a key that the other side's counterpart has too, and what is there."""

    key: Hashable
    payload: Any
    within: tuple[Hashable, ...] = ()
    """Keys of the ends of the calls that are open, outermost first."""


class Stopped(BaseException):
    """Ends a thread whose other side has failed, or whose comparison was interrupted."""


@dataclass(slots=True)
class _Side:
    pending: SideEvent | None = None
    ended: bool = False
    error: BaseException | None = None
    skip_until: Hashable | None = None
    stash: dict[Hashable, SideEvent] = field(default_factory=dict)
    randomness: Randomness | None = None


class Lockstep:
    """Runs two bodies in turns. `compare` is called on the reference's thread, with both payloads.

    Only one thread runs at any time; each has the random numbers of its own.
    """

    def __init__(self, compare: Callable[[Hashable, Any, Any], None]) -> None:
        self._compare = compare
        self._sides = (_Side(), _Side())
        self._turn = REFERENCE
        self._condition = Condition()
        self._stopping = False
        self.diverged: list[str] = []
        """Where one side called what the other did not."""
        self.unmatched = 0
        """Events of one side alone."""

    def run(self, reference: Body, candidate: Body) -> BaseException | None:
        """Run both to their ends, and return the exception that ended the candidate, if any.

        Raises what ended the reference, and what interrupts the wait. No thread is left.
        """
        start = Randomness.now()
        for side in self._sides:
            side.randomness = start
        threads = [
            Thread(target=self._thread, args=(index, body), name=f"compare-{index}", daemon=True)
            for index, body in ((REFERENCE, reference), (CANDIDATE, candidate))
        ]
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        finally:
            with self._condition:
                self._stopping = True
                self._condition.notify_all()
            for thread in threads:
                if thread.ident is not None:
                    thread.join()
            start.restore()
        if (error := self._sides[REFERENCE].error) is not None:
            raise error
        return self._sides[CANDIDATE].error

    def post(self, index: int, event: SideEvent, *, ordered: bool = True) -> None:
        """Stop a side at an event until it has been compared, or until it has no counterpart.

        ordered: events come in the same order on both sides, except where the control flow
        diverges; then both go on from the end of the innermost call that is open on both.
        Others, such as gradients, may come in any order, and wait for their counterpart.
        """
        side = self._sides[index]
        if ordered and side.skip_until is not None:
            if event.key != side.skip_until:
                self.unmatched += 1
                return
            side.skip_until = None
        other = self._sides[1 - index]
        if other.ended:
            self.unmatched += 1
            return
        side.pending = event
        if index == CANDIDATE:
            self._hand_over(index)
            return
        while side.pending is event:
            if other.pending is None and not other.ended:
                self._hand_over(index)
                continue
            self._settle(event, ordered)

    def _settle(self, event: SideEvent, ordered: bool) -> None:
        """Compare what both sides wait with, or part them."""
        one, other = self._sides
        met = other.pending
        if met is not None and met.key == event.key:
            one.pending = other.pending = None
            self._compare(event.key, event.payload, met.payload)
        elif met is None:
            one.pending = None
            self.unmatched += 1
        elif not ordered:
            self._settle_stashed()
        else:
            self._part(event, met)

    def _settle_stashed(self) -> None:
        one, other = self._sides
        for side in (one, other):
            if side.pending is not None:
                side.stash[side.pending.key] = side.pending
                side.pending = None
        for key in one.stash.keys() & other.stash.keys():
            self._compare(key, one.stash.pop(key).payload, other.stash.pop(key).payload)

    def _part(self, event: SideEvent, met: SideEvent) -> None:
        """Let both sides go on alone to the end of the innermost call that both are in."""
        both = zip(event.within, met.within, strict=False)
        common = [key for key, _ in takewhile(lambda pair: pair[0] == pair[1], both)]
        target = common[-1] if common else None
        self.diverged.append(f"{event.key!s} against {met.key!s}")
        for side, stopped in zip(self._sides, (event, met), strict=True):
            if target is not None and stopped.key == target:
                continue
            side.pending = None
            side.skip_until = target if target is not None else object()
            self.unmatched += 1

    def _hand_over(self, index: int) -> None:
        """Give the turn to the other side, and wait for it to come back."""
        mine, other = self._sides[index], self._sides[1 - index]
        mine.randomness = Randomness.now()
        with self._condition:
            if not other.ended:
                if other.randomness is not None:
                    other.randomness.restore()
                self._turn = 1 - index
                self._condition.notify_all()
                self._wait(index)
            if self._stopping:
                raise Stopped
        mine.randomness.restore()

    def _wait(self, index: int) -> None:
        while self._turn != index and not self._stopping:
            self._condition.wait()

    def _thread(self, index: int, body: Body) -> None:
        side, other = self._sides[index], self._sides[1 - index]
        try:
            with self._condition:
                self._wait(index)
                if self._stopping:
                    return
            body()
        except Stopped:
            pass
        except BaseException as error:
            side.error = error
        finally:
            with self._condition:
                side.ended = True
                # What the other side still does has nothing to be compared with.
                self._stopping = self._stopping or side.error is not None
                if other.randomness is not None and not other.ended:
                    other.randomness.restore()
                self._turn = 1 - index
                self._condition.notify_all()
