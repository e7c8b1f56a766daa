"""Where the ranks of a group settle what all of them do or none: at the store of the job.

A collective that a rank does not enter blocks those that do, and breaks the group that it belongs
to. So ranks meet at the store before their first collective, and collectives of ours run in a gloo
group of our own, which torch's list of process groups does not have: neither its names nor its end
concern the job.
"""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, Protocol

import msgspec
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from mp_agent.probe.processes.launchers import describe_ranks
from mp_agent.ring.files import beyond_standard_streams
from mp_agent.ring.interruptions import pass_on

WAIT_SECONDS_AT_MOST = 10.0
"""Longest wait for ranks that take no part."""
_SHARE_WHERE_RANKS_WERE_MISSING = 0.1
"""Share of that wait in later meetings of the same ranks: the script waits for them once."""
_SHARE_OF_TIMEOUT = 0.25
"""Share of the job's own time-out: the other ranks may be waiting in a collective of the job."""
_POLL_SECONDS = 0.001
_POLL_SECONDS_AT_MOST = 0.05
_DIFFERENCES_AT_MOST = 3

_YES, _NO = "yes", "no"

_incomplete: set[tuple[int, ...]] = set()
"""Ranks of meetings to which some of them did not come."""


class MeetingStore(Protocol):
    """What is used of a store of torch; every method may raise RuntimeError."""

    def set(self, key: str, value: str) -> None:
        """Keep a value."""

    def add(self, key: str, amount: int) -> int:
        """Add to a number, 0 at first, and return the sum."""

    def check(self, keys: list[str]) -> bool:
        """Return whether there are values, without waiting."""

    def compare_set(self, key: str, expected: str, value: str) -> bytes:
        """Set a value in place of the expected one, "" for none, and return the one that holds."""


class OwnGroup(Protocol):
    """What is used of torch's ProcessGroupGloo, which builds without gloo do not have."""

    def rank(self) -> int:
        """Return the position of this member."""

    def size(self) -> int:
        """Return the number of members."""

    def allreduce(self, tensors: Sequence[torch.Tensor], options: Any) -> dist.Work:
        """Begin to reduce tensors in place."""

    def allgather(
        self, outputs: Sequence[Sequence[torch.Tensor]], inputs: Sequence[torch.Tensor]
    ) -> dist.Work:
        """Begin to gather the tensors of all members."""


class NotMet(Exception):
    """Some rank is missing, or has other settings.

    feature: what does not take place, for the list of what is unsupported. speaks: whether this
    rank is the one to log it.
    """

    def __init__(self, problem: str, feature: str, *, speaks: bool) -> None:
        super().__init__(problem)
        self.feature = feature
        self.speaks = speaks


class _Verdict(msgspec.Struct, frozen=True):
    problem: str = ""
    """Empty where all ranks are there and alike."""
    feature: str = ""
    speaker: int = 0
    """Position of the member that logs the problem."""


class Meeting:
    """The members of a group, who all know each other after `join`."""

    def __init__(
        self,
        name: str,
        store: MeetingStore,
        ranks: Sequence[int],
        position: int,
        wait_seconds: float = WAIT_SECONDS_AT_MOST,
    ) -> None:
        """name: unique at the store. ranks: of the members in the job. position: this one's."""
        self.ranks = tuple(ranks)
        self.position = position
        self.wait_seconds = wait_seconds
        missed_before = self.ranks in _incomplete
        self._join_seconds = wait_seconds * (
            _SHARE_WHERE_RANKS_WERE_MISSING if missed_before else 1
        )
        self._name = name.partition("/")[0]
        self._store = _part_of(store, f"mp_agent/{name}/{describe_ranks(ranks)}")
        self._ballots = 0

    @classmethod
    def of(cls, name: str, group: dist.ProcessGroup | None) -> "Meeting | None":
        """Return the meeting of a process group; None while there is just one rank.

        group: None for the job's own. All its ranks have to call this equally often.
        """
        if not (dist.is_available() and dist.is_initialized()):
            return None
        if dist.get_world_size(group) == 1:
            return None
        ranks = dist.get_process_group_ranks(group)
        position = dist.get_rank(group)
        store = distributed_c10d._get_default_store()
        wait_seconds = min(WAIT_SECONDS_AT_MOST, _SHARE_OF_TIMEOUT * _timeout_seconds(group, store))
        # torchrun's store outlives its workers: without the attempt, a restarted rank would find
        # answers and addresses of processes that are gone.
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        # The store counts how often each member has met: a process that replaces another in a job
        # which goes on has not met as often as the others have.
        begun = _part_of(store, f"mp_agent/{name}/{attempt}/{describe_ranks(ranks)}")
        count = begun.add(f"meetings of {position}", 1)
        return cls(f"{name}/{attempt}/{count}", store, ranks, position, wait_seconds)

    def join(self, settings: Mapping[str, object]) -> None:
        """Wait until all members are here with the same settings.

        Raises NotMet on every member where some are not: none of them goes on.
        """
        own = msgspec.json.encode(settings, order="sorted").decode()
        deadline = time.monotonic() + self._join_seconds
        self._store.set(self._of(self.position), own)
        first = self._propose("first", f"{self.position} {own}")
        other, _, theirs = first.partition(" ")
        if theirs != own:
            # The first member is to say it, if it comes.
            self._await(lambda: self._store.check([self._of(0)]), deadline)
            verdict = self._differing(int(other), msgspec.json.decode(theirs), settings)
        elif self._store.add("here", 1) == len(self.ranks):
            verdict = self._decide(_Verdict())
        else:
            self._await(lambda: self._store.check(["verdict"]), deadline)
            verdict = self._missing()
        if verdict.problem:
            speaks = verdict.speaker == self.position
            raise NotMet(verdict.problem, verdict.feature, speaks=speaks)

    def all_agree(self, agrees: bool) -> bool:
        """Return whether all members call this with True, in time; the same on all of them.

        Each member calls it equally often, or once with False and never again.
        """
        self._ballots += 1
        number = self._ballots
        if not agrees:
            return self._propose(f"ballot {number}", _NO) == _YES
        deadline = time.monotonic() + self.wait_seconds
        if self._store.add(f"ballots {number}", 1) == len(self.ranks):
            return self._propose(f"ballot {number}", _YES) == _YES
        self._await(lambda: self._store.check([f"ballot {number}"]), deadline)
        return self._propose(f"ballot {number}", _NO) == _YES

    def connect(self) -> OwnGroup:
        """Return a gloo group of the members, whose collectives last no longer than a wait does.

        Raises RuntimeError where that fails on any of them.
        """
        if not dist.is_gloo_available():
            raise RuntimeError("this build of torch has no gloo")
        limit = timedelta(seconds=self.wait_seconds)
        store = _part_of(self._store, "group")
        with beyond_standard_streams():
            made: OwnGroup = _of_torch("ProcessGroupGloo")(
                store, self.position, len(self.ranks), limit
            )
        return made

    def _of(self, position: int) -> str:
        return f"settings of {position}"

    def _propose(self, key: str, value: str) -> str:
        """Set a value unless there is one; return the one that holds for all."""
        held: bytes = self._store.compare_set(key, "", value)
        return held.decode()

    def _decide(self, verdict: _Verdict) -> _Verdict:
        held = self._propose("verdict", msgspec.json.encode(verdict).decode())
        return msgspec.json.decode(held, type=_Verdict)

    def _differing(
        self, other: int, theirs: Mapping[str, object], own: Mapping[str, object]
    ) -> _Verdict:
        one, two = sorted([(other, theirs), (self.position, own)], key=lambda member: member[0])
        found = [
            f"{name} is {_text(one[1][name])} on rank {self.ranks[one[0]]} and "
            f"{_text(two[1][name])} on rank {self.ranks[two[0]]}"
            for name in own
            if name in theirs and theirs[name] != own[name]
        ]
        more = len(found) - _DIFFERENCES_AT_MOST
        problem = "; ".join(found[:_DIFFERENCES_AT_MOST]) + (f"; {more} more" if more > 0 else "")
        speaker = 0 if self._store.check([self._of(0)]) else self.position
        feature = f"{self._name} where its settings differ between ranks"
        return self._decide(_Verdict(problem, feature, speaker))

    def _missing(self) -> _Verdict:
        """Return the verdict that there is, or else who is missing."""
        if self._store.check(["verdict"]):
            return self._decide(_Verdict())
        here = [self._store.check([self._of(member)]) for member in range(len(self.ranks))]
        missing = [rank for rank, is_here in zip(self.ranks, here, strict=True) if not is_here]
        who = f"rank {missing[0]} takes" if len(missing) == 1 else f"{len(missing)} ranks take"
        _incomplete.add(self.ranks)
        which = "" if len(missing) == 1 else f": {describe_ranks(missing)}"
        problem = f"{who} no part within {self._join_seconds:g} s{which}"
        feature = f"{self._name} where ranks take no part"
        return self._decide(_Verdict(problem, feature, here.index(True)))

    def _await(self, is_there: Callable[[], bool], deadline: float) -> None:
        pause_seconds = _POLL_SECONDS
        while not is_there() and time.monotonic() < deadline:
            time.sleep(pause_seconds)
            pause_seconds = min(1.5 * pause_seconds, _POLL_SECONDS_AT_MOST)


def reduced(
    group: OwnGroup, numbers: torch.Tensor, operation: dist.ReduceOp.RedOpType
) -> dist.Work:
    """Begin to reduce `numbers`, in place. They have to be kept until the group is released.

    Otherwise a thread of gloo's may be the last to hold them, which waits for the interpreter's
    lock that the thread which releases the group holds.
    """
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp(operation)
    return group.allreduce([numbers], options)


def cause_of(error: Exception) -> str:
    """Return what an error of a store or a group says, in one line, without its place in C++."""
    line = str(error).partition("\n")[0]
    return (line.partition("] ")[2] or line).partition(". ")[0]


def exchanged(group: OwnGroup, own: bytes) -> list[bytes]:
    """Return what each member gives, in their order; waits for them."""
    sizes = _gathered(group, torch.tensor([len(own)]))
    longest = max(int(size) for size in sizes)
    padded = torch.zeros(max(longest, 1), dtype=torch.uint8)
    padded[: len(own)] = torch.frombuffer(bytearray(own), dtype=torch.uint8) if own else padded[:0]
    gathered = _gathered(group, padded)
    return [
        bytes(values[: int(size)].numpy()) for values, size in zip(gathered, sizes, strict=True)
    ]


def _gathered(group: OwnGroup, own: torch.Tensor) -> list[torch.Tensor]:
    found = [torch.zeros_like(own) for _ in range(group.size())]
    group.allgather([found], [own]).wait()
    return found


def _text(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _of_torch(name: str) -> Any:
    """Return a class of torch that its modules do not export to type checkers."""
    return getattr(distributed_c10d, name)


def _part_of(store: MeetingStore, name: str) -> MeetingStore:
    """Return a part of a store with its own keys."""
    part: MeetingStore = _of_torch("PrefixStore")(name, store)
    return part


def _timeout_seconds(group: dist.ProcessGroup | None, store: Any) -> float:
    """Return the shortest time-out of the job that is known here."""
    found = [float(store.timeout.total_seconds())]
    for each in filter(None, {group, dist.group.WORLD}):
        for device in each._device_types:
            try:
                options: Any = each._get_backend(device).options
                found.append(float(options._timeout.total_seconds()))
            except (RuntimeError, AttributeError) as error:
                pass_on(error)
    return min(found)
