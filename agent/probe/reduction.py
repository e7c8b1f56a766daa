"""Reduces the records of the ranks at the end of a step, and takes the result up later."""

import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
import torch.distributed as dist

from mp_agent.probe.meeting import Meeting, NotMet, OwnGroup, cause_of, exchanged, reduced
from mp_agent.probe.packing import AssumedGroups, GroupLayout, Packing, TensorGroup, groups_of
from mp_agent.records.global_statistics import GlobalStatistics
from mp_agent.records.schema import Schema
from mp_agent.records.steps import StepRecord
from mp_agent.ring.interruptions import pass_on
from mp_agent.version import __version__

log = logging.getLogger("mp_agent")

_APART = "the reduction by ranks where they cannot meet"

LAG_STEPS = 4
"""Steps that a record is given to come from a device. One that has not is reduced as absent: ranks
that took what has arrived would not reduce the same step."""


class _UnderWay(NamedTuple):
    sequence: int
    packing: Packing
    sums: torch.Tensor
    extremes: torch.Tensor
    works: tuple[Any, ...]

    @property
    def is_over(self) -> bool:
        return all(work.is_completed() for work in self.works)


class GroupReduction:
    """The reduction over the ranks of one process group.

    The ranks meet when the first step has ended. Every `interval`-th step begins two asynchronous
    collectives, after those of the time before have been taken up, for which it waits if need be.
    In synchronous training nothing is waited for: a rank that has ended a step has met all others
    in its backward, after they ended the step before. What fails, or takes longer than a wait may,
    turns it off in this process.
    """

    def __init__(
        self,
        meeting: Callable[[], Meeting | None],
        interval: int,
        note_off: Callable[[str], None] = lambda feature: None,
    ) -> None:
        """Reduce nothing yet.

        meeting: called on all ranks at the same step; returns None while there is one rank.
        note_off: called when it is turned off.
        """
        self.latest: GlobalStatistics | None = None
        self._meeting_of_ranks = meeting
        self._interval = interval
        self._note_off = note_off
        self._group: OwnGroup | None = None
        self._is_off = False
        self._records: OrderedDict[int, tuple[StepRecord, Schema]] = OrderedDict()
        self._newest_schema: Schema | None = None
        self._assumed = AssumedGroups()
        self._packing: Packing | None = None
        self._under_way: _UnderWay | None = None
        self._taken_up: _UnderWay | None = None
        """The last one, whose tensors a thread of the group's may still hold."""

    @property
    def is_first_rank(self) -> bool:
        """Whether this is the group's first rank; False before the group is made."""
        return self._group is not None and self._group.rank() == 0

    def record_written(self, record: StepRecord, schema: Schema) -> None:
        """Keep a complete record until its step is reduced."""
        self._newest_schema = schema
        self._records[record.sequence] = record, schema
        while len(self._records) > LAG_STEPS + 2:
            self._records.popitem(last=False)

    def step_ended(self, sequence: int, *, on_host: bool) -> None:
        """Begin what is due now that step `sequence` has ended, and take up what is over.

        on_host: whether records are written as soon as their steps are over.
        """
        if self._is_off:
            return
        try:
            if self._group is None and not self._meet(sequence, on_host=on_host):
                return
            if self._under_way is not None and self._under_way.is_over:
                self._take_up()
            if sequence % self._interval == 0:
                self._begin(sequence - (1 if on_host else LAG_STEPS))
        except Exception as error:
            pass_on(error)
            if not isinstance(error, NotMet):
                error = NotMet(cause_of(error), _APART, speaks=True)
            if error.speaks:
                log.warning("the ranks do not reduce their statistics: %s", error)
            self._note_off(error.feature)
            self._end()

    def group_ends(self, group: dist.ProcessGroup | None) -> None:
        """Take up what is under way before the job's process groups are destroyed.

        The ranks meet again in those that are made after them.
        """
        if group is not None or self._is_off:
            return
        self.close()
        self._records.clear()
        self._packing, self._assumed = None, AssumedGroups()
        self._is_off = False

    def close(self) -> None:
        """Take up what is under way, and release the group."""
        try:
            if not self._is_off:
                self._take_up()
        except Exception as error:
            pass_on(error)
            log.debug("the last reduction was not completed: %s", error)
        finally:
            self._end()

    def _end(self) -> None:
        """Reduce no more. A group that is released waits for its collectives, or what they are."""
        under_way, self._under_way = self._under_way, None
        self._is_off = True
        for work in () if under_way is None else under_way.works:
            try:
                work.wait()
            except RuntimeError as error:
                pass_on(error)
        self._group = None

    def _meet(self, sequence: int, *, on_host: bool) -> bool:
        """Meet the other ranks; return whether there are any."""
        meeting = self._meeting_of_ranks()
        if meeting is None:
            return False
        settings: Mapping[str, object] = {
            "mp_agent": __version__,
            "reduction_interval": self._interval,
            "the number of the step": sequence,
            "the place of records": "the host" if on_host else "a device",
        }
        meeting.join(settings)
        self._group = meeting.connect()
        return True

    def _begin(self, sequence: int) -> None:
        if self._under_way is not None:
            self._take_up()
        if sequence < 1 or self._group is None:
            return
        if self._packing is None:
            layout = self._agreed_layout(self._group)
            self._packing = Packing(layout, self._assumed, is_first_rank=self.is_first_rank)
        record, schema = self._records.get(sequence, (None, self._newest_schema))
        sums, extremes = map(torch.from_numpy, self._packing.packed(record, schema))
        works = (
            reduced(self._group, sums, dist.ReduceOp.SUM),
            reduced(self._group, extremes, dist.ReduceOp.MAX),
        )
        self._under_way = _UnderWay(sequence, self._packing, sums, extremes, works)

    def _agreed_layout(self, group: OwnGroup) -> GroupLayout:
        """Exchange the groups of all ranks. Waits for them: once, and when any has new ones."""
        own = [] if self._newest_schema is None else groups_of(self._newest_schema)
        everyone = exchanged(group, msgspec.json.encode(own))
        return GroupLayout.of(
            msgspec.json.decode(groups, type=list[TensorGroup]) for groups in everyone
        )

    def _take_up(self) -> None:
        """Wait for what is under way, which mostly is over, and make it the latest."""
        under_way, group = self._under_way, self._group
        if under_way is None or group is None:
            return
        for work in under_way.works:
            work.wait()
        self._under_way, self._taken_up = None, under_way
        sums = under_way.sums.numpy().astype(np.int64, copy=False)
        if under_way.packing.is_outdated(sums):
            self._packing = None
        self.latest = under_way.packing.unpacked(
            under_way.sequence, group.size(), sums, under_way.extremes.numpy()
        )
