"""Steps of one form become a block on the node, and a block becomes rows of arrays at the root."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from math import isnan
from weakref import WeakValueDictionary

import numpy as np
import numpy.typing as npt

from mp_agent.node.merge.coverage import GroupKey, group_key
from mp_agent.node.merge.family_rows import AlikeRows
from mp_agent.records.columns import STEP_COLUMNS_BY_NAME, ColumnFamily
from mp_agent.records.node_report import NodeShare, NodeStep
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
    width: int
    """Number of values, also of columns that this agent does not know."""


@dataclass(frozen=True, eq=False)
class AlikeForms:
    """The forms of nodes whose rows are of one kind, without their numbers."""

    kind: StepKind
    forms: Sequence["PlacedForm"]

    @cached_property
    def ranks(self) -> Places:
        """The ranks of all nodes, node after node."""
        return np.concatenate([own.ranks for own in self.forms])

    @cached_property
    def rows(self) -> Sequence[AlikeRows]:
        """The rows, by their number in the kind."""
        return [
            AlikeRows([own.form.rows[number] for own in self.forms])
            for number in range(len(self.kind.rows))
        ]


class AlikeNodes:
    """Gives each node whose rows are of one kind a place in the arrays of every step."""

    def __init__(self, kind: StepKind) -> None:
        self.kind = kind
        self.places: dict[int, int] = {}
        self._last = AlikeForms(kind, ())

    def forms(self, forms: Sequence["PlacedForm"]) -> AlikeForms:
        """Return what is known of these forms; nearly every step has the same ones."""
        if self._last.forms != forms:
            self._last = AlikeForms(self.kind, forms)
        return self._last


@dataclass(frozen=True, slots=True, eq=False)
class PlacedForm:
    """A form of a node that has a place among those whose rows are of the same kind."""

    form: StepForm
    place: int
    ranks: Places
    digest_ends: tuple[int, ...]
    """Of each row, where its digests end among those of a step."""


@dataclass(frozen=True, slots=True)
class NodeForm:
    """A form as this agent reads it."""

    placed: PlacedForm
    nodes: AlikeNodes

    @property
    def form(self) -> StepForm:
        """The form as it was sent."""
        return self.placed.form


class Forms:
    """Reads the forms of all nodes."""

    def __init__(self, families: Iterable[ColumnFamily]) -> None:
        self._families = {family.name: family for family in families}
        self._kinds: WeakValueDictionary[StepKind, AlikeNodes] = WeakValueDictionary()
        """Those that the last form of a node, or an open step, is of."""

    def read(
        self,
        number: int,
        form: StepForm,
        step_columns: Sequence[str],
        families: Sequence[FamilyColumns],
        shares: Sequence[NodeShare],
    ) -> NodeForm:
        """Return what the form of the node with this number says."""
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
            width=form.width,
        )
        nodes = self._kinds.setdefault(kind, AlikeNodes(kind))
        place = nodes.places.setdefault(number, len(nodes.places))
        sizes = (len(row.shards) if row.compared else 0 for row in form.rows)
        ranks = np.array(form.ranks, dtype=np.intp)
        return NodeForm(PlacedForm(form, place, ranks, tuple(accumulate(sizes))), nodes)


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


class AlikeSteps:
    """The same step of nodes whose rows are of one kind, as they come in, in any order."""

    def __init__(self, nodes: AlikeNodes) -> None:
        self._nodes = nodes
        self._forms: list[PlacedForm | None] = []
        """By place; None of a node whose step is not here."""
        self._values = np.empty((0, nodes.kind.width))
        """[N, W], by place."""
        self._digests: dict[int, npt.NDArray[np.uint32]] = {}

    def add(self, rows: BlockRows, at: int) -> None:
        """Copy a node's step, which has this place in its block."""
        place = rows.own.placed.place
        if place >= len(self._forms):
            self._extend()
        self._forms[place] = rows.own.placed
        self._values[place] = rows.values[at]
        if rows.digests.size:
            self._digests[place] = rows.digests[at]

    def united(self) -> "UnitedSteps":
        """Return the steps that are here, by place."""
        forms = [own for own in self._forms if own is not None]
        values = self._values[: len(forms)]
        if self._forms[: len(forms)] != forms:
            values = self._values[[own.place for own in forms]]
        digests = [self._digests[own.place] for own in forms if own.place in self._digests]
        return UnitedSteps(self._nodes.forms(forms), values, digests)

    def _extend(self) -> None:
        """Make room for the nodes that are known by now; more come while a run starts."""
        size = max(len(self._nodes.places), 2 * len(self._forms))
        values = np.empty((size, self._nodes.kind.width))
        values[: len(self._forms)] = self._values
        self._values = values
        self._forms += [None] * (size - len(self._forms))


@dataclass(frozen=True, slots=True, eq=False)
class UnitedSteps:
    """The same step of nodes whose rows are of one kind."""

    alike: AlikeForms
    values_NW: FloatArray
    digests: Sequence[npt.NDArray[np.uint32]]
    """Of each node that has any."""

    @property
    def kind(self) -> StepKind:
        """What the rows have in common."""
        return self.alike.kind

    @property
    def compute_seconds(self) -> FloatArray:
        """Of the ranks, node after node."""
        first = len(self.kind.names)
        return self.values_NW[:, first : first + self.kind.ranks].ravel()

    @property
    def losses(self) -> FloatArray:
        """Of the ranks, likewise; empty where none is known."""
        first = len(self.kind.names) + self.kind.ranks
        return self.values_NW[:, first : first + self.kind.ranks * self.kind.has_losses].ravel()

    def columns(self, row: RowKind, size: int) -> FloatArray:
        """Return [N, size]: a row of each node in this agent's columns, NaN where absent."""
        # Column by column in memory: so they are merged.
        found_CN = np.full((size, len(self.values_NW)), np.nan)
        for at, column in zip(row.sent, row.known, strict=True):
            found_CN[column] = self.values_NW[:, row.first + at]
        return found_CN.T

    def rows(self, number: int) -> Iterator[tuple[RowForm, tuple[int, ...]]]:
        """Yield a row's form and its digests, node by node."""
        digests = iter(self.digests)
        for own in self.alike.forms:
            ends = own.digest_ends
            found = next(digests) if ends[-1] else ()
            before = ends[number - 1] if number else 0
            yield own.form.rows[number], tuple(map(int, found[before : ends[number]]))
