"""Reduces the records of the ranks at the end of a step, and takes the result up later."""

import logging
from collections import OrderedDict
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from mp_agent.probe.reduction.assumed_groups import AssumedGroups
from mp_agent.probe.reduction.layout import GroupLayout, TensorGroup, groups_of
from mp_agent.probe.reduction.packing import Packing
from mp_agent.records.reduction.global_statistics import GlobalStatistics
from mp_agent.records.schema import Schema
from mp_agent.records.steps import StepRecord

log = logging.getLogger("mp_agent")

WAIT_AT_MOST = timedelta(seconds=10)
"""For ranks that take no part. In synchronous training nothing is waited for: a rank that has ended
a step has met all others in its backward, after they ended the step before."""

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

    Every `interval`-th step begins two asynchronous collectives, after those of the time before
    have been taken up, for which it waits if need be. What fails turns it off in this process.
    """

    def __init__(self, make_group: Callable[[], dist.ProcessGroup | None], interval: int) -> None:
        """make_group: called once, on all ranks at the same step; None where there is one rank."""
        self.latest: GlobalStatistics | None = None
        self._make_group = make_group
        self._interval = interval
        self._group: dist.ProcessGroup | None = None
        self._is_off = False
        self._records: OrderedDict[int, tuple[StepRecord, Schema]] = OrderedDict()
        self._newest_schema: Schema | None = None
        self._assumed = AssumedGroups()
        self._packing: Packing | None = None
        self._under_way: _UnderWay | None = None

    @property
    def is_first_rank(self) -> bool:
        """Whether this is the group's first rank; False before the group is made."""
        return self._group is not None and dist.get_rank(self._group) == 0

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
            if self._under_way is not None and self._under_way.is_over:
                self._take_up()
            if sequence % self._interval == 0:
                self._begin(sequence - (1 if on_host else LAG_STEPS))
        except Exception:
            self._is_off = True
            self._under_way = None
            log.warning("the ranks could not reduce their statistics; they no longer do")
            raise

    def group_ends(self, group: dist.ProcessGroup | None) -> None:
        """Take up what is under way before the job's process groups are destroyed."""
        if group is None and not self._is_off:
            self._is_off = True
            self._take_up()

    def _begin(self, sequence: int) -> None:
        if self._under_way is not None:
            self._take_up()
        if sequence < 1:
            return
        if self._group is None:
            self._group = self._make_group()
        if self._group is None:
            self._is_off = True
            return
        if self._packing is None:
            layout = self._agreed_layout(self._group)
            is_first = dist.get_rank(self._group) == 0
            self._packing = Packing(layout, self._assumed, is_first_rank=is_first)
        record, schema = self._records.get(sequence, (None, self._newest_schema))
        sums, extremes = map(torch.from_numpy, self._packing.packed(record, schema))
        works = (
            dist.all_reduce(sums, op=dist.ReduceOp.SUM, group=self._group, async_op=True),
            dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=self._group, async_op=True),
        )
        self._under_way = _UnderWay(sequence, self._packing, sums, extremes, works)

    def _agreed_layout(self, group: dist.ProcessGroup) -> GroupLayout:
        """Exchange the groups of all ranks. Waits for them: once, and when any has new ones."""
        own = [] if self._newest_schema is None else groups_of(self._newest_schema)
        everyone: list[list[TensorGroup]] = [[] for _ in range(dist.get_world_size(group))]
        dist.all_gather_object(everyone, own, group=group)
        return GroupLayout.of(everyone)

    def _take_up(self) -> None:
        """Wait for what is under way, which mostly is over, and make it the latest."""
        under_way, self._under_way = self._under_way, None
        if under_way is None:
            return
        for work in under_way.works:
            work.wait(WAIT_AT_MOST)
        sums = under_way.sums.numpy().astype(np.int64, copy=False)
        if under_way.packing.is_outdated(sums):
            self._packing = None
        self.latest = under_way.packing.unpacked(
            under_way.sequence,
            dist.get_world_size(self._group),
            sums,
            under_way.extremes.numpy(),
        )
