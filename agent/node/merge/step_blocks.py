"""Steps of one form become a block on the node, and a block becomes rows of arrays at the root."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import isnan

import numpy as np
import numpy.typing as npt

from mp_agent.node.merge.coverage import GroupKey, group_key
from mp_agent.records.columns import STEP_COLUMNS_BY_NAME, ColumnFamily
from mp_agent.records.reports import NodeShare, NodeStep
from mp_agent.records.schema import FamilyColumns
from mp_agent.records.steps import FloatArray, RowForm, StepBlock, StepForm


def in_blocks(steps: Iterable[NodeStep]) -> tuple[tuple[StepBlock, ...], tuple[NodeStep, ...]]:
    """Return steps as blocks, and those with something that no block can hold."""
    alike: dict[StepForm, list[NodeStep]] = {}
    others: list[NodeStep] = []
    for step in steps:
        if (
            step.nonfinite_loss_ranks
            or step.nonfinite_gradients
            or step.samples
            or step.batches
            or step.batch_rows
        ):
            others.append(step)
        else:
            alike.setdefault(_form(step), []).append(step)
    return tuple(_block(form, own) for form, own in alike.items()), tuple(others)


def _form(step: NodeStep) -> StepForm:
    return StepForm(
        ranks=step.ranks,
        holding=step.holding,
        places=tuple(place for place, value in enumerate(step.values) if value.count),
        counts=tuple(value.count for value in step.values if value.count),
        rows=tuple(
            RowForm(
                family=row.family,
                share=row.share,
                shards=row.shards,
                replicas=row.replicas,
                ranks=row.ranks,
                places=tuple(at for at, value in enumerate(row.columns) if not isnan(value)),
                compared=bool(row.digests),
            )
            for row in step.rows
        ),
        has_losses=bool(step.losses),
    )


def _block(form: StepForm, steps: Sequence[NodeStep]) -> StepBlock:
    values = [
        [
            *(step.values[place].value for place in form.places),
            *step.compute_seconds,
            *step.losses,
            *(
                row.columns[place]
                for row, own in zip(step.rows, form.rows, strict=True)
                for place in own.places
            ),
        ]
        for step in steps
    ]
    digests = [digest for step in steps for row in step.rows for digest in row.digests]
    return StepBlock(
        form=form,
        sequences=tuple(step.sequence for step in steps),
        steps=tuple(step.step for step in steps),
        times_unix_seconds=tuple(step.time_unix_seconds for step in steps),
        values=np.array(values, dtype="<f8").tobytes(),
        digests=np.array(digests, dtype="<u4").tobytes(),
    )


Places = npt.NDArray[np.intp]


@dataclass(frozen=True, slots=True)
class RowKind:
    """What rows of several nodes have in common: what they are of, and their columns."""

    family: str
    share: NodeShare
    key: GroupKey
    first: int
    """Place of the first column among the values of a step."""
    sent: tuple[int, ...]
    """Columns that this agent knows, as places after the first."""
    known: tuple[int, ...]
    """The same columns, as places among this agent's."""


@dataclass(frozen=True, slots=True)
class StepKind:
    """What steps of several nodes have in common: their values are columns of one array."""

    names: tuple[str, ...]
    """Step columns, by place; "" where this agent does not know one."""
    counts: tuple[int, ...]
    ranks: int
    has_losses: bool
    rows: tuple[RowKind, ...]


@dataclass(frozen=True, slots=True, eq=False)
class NodeForm:
    """A form as this agent reads it."""

    form: StepForm
    kind: StepKind
    ranks: Places


class Forms:
    """Reads the forms of all nodes; equal kinds are one object."""

    def __init__(self, families: Iterable[ColumnFamily]) -> None:
        self._families = {family.name: family for family in families}
        self._kinds: dict[StepKind, StepKind] = {}

    def read(
        self,
        form: StepForm,
        step_columns: Sequence[str],
        families: Sequence[FamilyColumns],
        shares: Sequence[NodeShare],
    ) -> NodeForm:
        """Return what a node's form says."""
        rows, first = [], form.first_of_rows
        for row in form.rows:
            sent, share = families[row.family], shares[row.share]
            family = self._families.get(sent.name)
            own = {} if family is None else {n: at for at, n in enumerate(family.names)}
            pairs = [
                (at, own[sent.columns[place]])
                for at, place in enumerate(row.places)
                if sent.columns[place] in own
            ]
            rows.append(
                RowKind(
                    family=sent.name,
                    share=share,
                    key=group_key(share),
                    first=first,
                    sent=tuple(at for at, _ in pairs),
                    known=tuple(at for _, at in pairs),
                )
            )
            first += len(row.places)
        names = (step_columns[place] for place in form.places)
        kind = StepKind(
            names=tuple(name if name in STEP_COLUMNS_BY_NAME else "" for name in names),
            counts=form.counts,
            ranks=len(form.ranks),
            has_losses=form.has_losses,
            rows=tuple(rows),
        )
        return NodeForm(
            form, self._kinds.setdefault(kind, kind), np.array(form.ranks, dtype=np.intp)
        )


@dataclass(frozen=True, slots=True, eq=False)
class BlockRows:
    """A node's block as it enters the steps."""

    own: NodeForm
    block: StepBlock
    values: FloatArray
    """[S, W]"""
    digests: npt.NDArray[np.uint32]
    """[S, D]"""

    @classmethod
    def of(cls, own: NodeForm, block: StepBlock) -> "BlockRows":
        """Return the rows of a block, without a copy."""
        return cls(own, block, block.array(), block.digest_array())


@dataclass(frozen=True, slots=True, eq=False)
class AlikeSteps:
    """The same step of nodes whose rows are of one kind."""

    kind: StepKind
    blocks: Sequence[BlockRows]
    at: Sequence[int]
    """Place of the step in each block."""
    values_NW: FloatArray

    @property
    def ranks(self) -> Places:
        """The ranks of all nodes, node after node."""
        return np.concatenate([block.own.ranks for block in self.blocks])

    @property
    def compute_seconds(self) -> FloatArray:
        """Of the ranks, in the same order."""
        first = len(self.kind.names)
        return self.values_NW[:, first : first + self.kind.ranks].ravel()

    @property
    def losses(self) -> FloatArray:
        """Of the ranks, likewise; empty where none is known."""
        first = len(self.kind.names) + self.kind.ranks
        return self.values_NW[:, first : first + self.kind.ranks * self.kind.has_losses].ravel()

    def columns(self, row: RowKind, size: int) -> FloatArray:
        """Return [N, size]: a row of each node in this agent's columns, NaN where absent."""
        found = np.full((len(self.blocks), size), np.nan)
        found[:, row.known] = self.values_NW[:, [row.first + at for at in row.sent]]
        return found

    def rows(self, number: int) -> Iterator[tuple[RowForm, tuple[int, ...]]]:
        """Yield a row's form and its digests, node by node."""
        for block, at in zip(self.blocks, self.at, strict=True):
            forms = block.own.form.rows
            row = forms[number]
            digests: tuple[int, ...] = ()
            if row.compared:
                before = sum(len(own.shards) for own in forms[:number] if own.compared)
                found = block.digests[at, before : before + len(row.shards)]
                digests = tuple(found.tolist())
            yield row, digests


def by_kind(entries: Iterable[tuple[BlockRows, int]]) -> Iterator[AlikeSteps]:
    """Yield the rows of a step, kind by kind; entries: each with its place in the block."""
    alike: dict[int, list[tuple[BlockRows, int]]] = {}
    for entry in entries:
        alike.setdefault(id(entry[0].own.kind), []).append(entry)
    for own in alike.values():
        values = np.concatenate([block.values[at] for block, at in own])
        blocks = [block for block, _ in own]
        yield AlikeSteps(
            kind=blocks[0].own.kind,
            blocks=blocks,
            at=[at for _, at in own],
            values_NW=values.reshape(len(own), -1),
        )
