"""Trackers of what is measured on request: FP8, routers, logits, collections and tensors.

Finds layers in FP8 whose scales do not fit their tensors, sample after sample.
Delayed scaling casts with the amax of earlier passes: an amax at the format's largest number is
what it aims at, and one beyond it for a pass is what it is designed to bear. A scale that is
wrong by far in several samples does not follow its tensor.

Finds routers that send most tokens to few experts, and are sure of it.
A load that is uneven alone may be the data's, and a small entropy that of a router that has learned
to decide; together, and for some samples, they are a router that has collapsed.

Finds policies that have become certain of all that they draw.

Finds attention logits and output logits that outgrow those of the run's past.
Both grow for many steps before the loss of a transformer diverges: softmax saturates, and in BF16
numbers above 128 are 1 apart.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import nan

from mp_agent.catalog.metrics.fp8 import flushed
from mp_agent.catalog.metrics.reinforcement import policy_entropy
from mp_agent.catalog.metrics.routers import entropy, unused_experts
from mp_agent.catalog.metrics.tensors import slice_imbalance, swallowed_share_of_reduction
from mp_agent.node.accounting.tracker import AccountContext, LayerObservation, Tracker
from mp_agent.node.accounting.windows import LARGEST, median
from mp_agent.records.columns import (
    ATTENTION,
    DISTRIBUTION,
    FP8,
    GRADIENTS,
    LOGITS,
    LOGPROBS,
    ROUTERS,
    TENSORS,
    ColumnFamily,
)
from mp_agent.records.health import (
    Fp8Flushing,
    Fp8Scaling,
    LogitGrowth,
    RouterBalance,
    TensorRows,
)
from mp_agent.records.merged import MergedStep
from mp_agent.records.tensor_collections import TensorCollection, members_of
from mp_agent.records.views import CollectionView, LayerView

NAMED_AT_MOST = 10


@dataclass(slots=True, kw_only=True)
class Fp8ScaleTracker(Tracker):
    """The layers beyond each limit, and for how many samples in a row.

    Layers without delayed scaling have no such numbers and are never among them.
    """

    saturated: dict[str, int] = field(default_factory=dict)
    """Samples in a row, by name, the largest range first."""
    unused: dict[str, int] = field(default_factory=dict)
    """Samples in a row, by name, the smallest range first."""
    sampled: bool = False

    def observe_layers(self, sample: LayerObservation, context: AccountContext) -> None:
        """Add the layers of a sampled step; those that do not count leave all as it was."""
        if sample.layers.family.name != FP8.name:
            return
        rows = [
            (view.name, view.values["range_used_max"], view.values["range_used_min"])
            for view in sample.views
            if view.judged and view.values.keys() >= {"range_used_max", "range_used_min"}
        ]
        if not rows:
            return
        self.sampled = True
        high, low = (context.thresholds[f"fp8_range_used_{side}"] for side in ("high", "low"))
        beyond = sorted((-largest, name) for name, largest, _ in rows if largest > high)
        below = sorted((smallest, name) for name, _, smallest in rows if smallest < low)
        self.saturated = {name: self.saturated.get(name, 0) + 1 for _, name in beyond}
        self.unused = {name: self.unused.get(name, 0) + 1 for _, name in below}

    def view(self, context: AccountContext) -> Fp8Scaling | None:
        """Return which layers are misscaled; None before any was sampled."""
        if not self.sampled:
            return None
        samples = context.thresholds["fp8_scaling_samples"]
        saturated = [name for name, count in self.saturated.items() if count >= samples]
        unused = [name for name, count in self.unused.items() if count >= samples]
        return Fp8Scaling(
            misscaled=len({*saturated, *unused}),
            saturated_names=tuple(saturated[:NAMED_AT_MOST]),
            unused_names=tuple(unused[:NAMED_AT_MOST]),
        )


@dataclass(slots=True, kw_only=True)
class Fp8FlushTracker(Tracker):
    """The inputs and weights that a cast by their own amax rounds to zero beyond the limit.

    Layers that do not cast so are never among them, though what a cast would do is measured.
    """

    beyond: dict[str, dict[str, int]] = field(default_factory=dict)
    """Operand → layer → samples in a row."""
    share: float | None = None

    def observe_layers(self, sample: LayerObservation, context: AccountContext) -> None:
        """Add the layers of a sampled step; those that do not count leave all as it was."""
        if sample.layers.family.name != FP8.name:
            return
        views = [view for view in sample.views if view.judged and view.values.get("cast_tensors")]
        if not views:
            return
        limit, self.share = context.thresholds["fp8_flushed"], 0.0
        for operand in ("input", "weight"):
            shares = {view.name: flushed(operand)(view.values) or 0.0 for view in views}
            self.share = max(self.share, *shares.values())
            known = self.beyond.get(operand, {})
            self.beyond[operand] = {
                name: known.get(name, 0) + 1 for name, share in shares.items() if share > limit
            }

    def view(self, context: AccountContext) -> Fp8Flushing | None:
        """Return which layers lose most of an operand; None before any was sampled."""
        if self.share is None:
            return None
        samples = context.thresholds["fp8_scaling_samples"]
        found = [
            (name, operand)
            for operand, layers in self.beyond.items()
            for name, count in layers.items()
            if count >= samples
        ]
        return Fp8Flushing(
            share=self.share,
            flushed=len({name for name, _ in found}),
            names=tuple(found[:NAMED_AT_MOST]),
        )


@dataclass(slots=True, kw_only=True)
class RouterTracker(Tracker):
    """The routers beyond both limits, and for how many samples in a row; the worst of the last."""

    beyond: dict[str, int] = field(default_factory=dict)
    """Samples in a row, by name, the largest load first."""
    entropy_min: float | None = None
    unused_max: float | None = None
    sampled: bool = False

    def observe_layers(self, sample: LayerObservation, context: AccountContext) -> None:
        """Add the routers of a sampled step; those that do not count leave all as it was."""
        if sample.layers.family.name != ROUTERS.name:
            return
        views = [view for view in sample.views if view.judged]
        if not views:
            return
        found = [_Router.of(view) for view in views]
        self.sampled = True
        self.entropy_min = min(
            (one.entropy for one in found if one.entropy is not None), default=None
        )
        self.unused_max = max((one.unused for one in found if one.unused is not None), default=None)
        low, high = context.thresholds["router_entropy_low"], context.thresholds["router_load_high"]
        uneven = [
            one
            for one in found
            if one.entropy is not None and one.entropy < low and one.load > high
        ]
        uneven.sort(key=lambda one: -one.load)
        self.beyond = {one.name: self.beyond.get(one.name, 0) + 1 for one in uneven}

    def view(self, context: AccountContext) -> RouterBalance | None:
        """Return which routers have collapsed; None before any was sampled."""
        if not self.sampled:
            return None
        samples = context.thresholds["router_collapse_samples"]
        collapsed = [name for name, count in self.beyond.items() if count >= samples]
        return RouterBalance(
            entropy_min=self.entropy_min,
            unused_max=self.unused_max,
            collapsed=len(collapsed),
            collapsed_names=tuple(collapsed[:NAMED_AT_MOST]),
        )


@dataclass(frozen=True, slots=True)
class _Router:
    name: str
    load: float
    entropy: float | None
    unused: float | None

    @classmethod
    def of(cls, view: LayerView) -> "_Router":
        values = view.values
        return cls(view.name, values.get("load_max", 0.0), entropy(values), unused_experts(values))


log = logging.getLogger("mp_agent.node")

_FAMILIES = (GRADIENTS.name, DISTRIBUTION.name)


@dataclass(slots=True, kw_only=True)
class CollectionTracker(Tracker):
    """The columns of each collection, of the last sample of which all that was measured counts."""

    views: dict[str, CollectionView] = field(default_factory=dict)
    """Views by name, in the order of the definitions."""

    def observe_layers(self, sample: LayerObservation, context: AccountContext) -> None:
        """Add the layers of a sampled step, if collections are made of this family."""
        if sample.layers.family.name not in _FAMILIES:
            return
        before, self.views = self.views, {}
        for collection in sample.collections:
            known = before.get(collection.name)
            view = self.views[collection.name] = _after(known, collection, sample)
            if not view.layers and (known is None or known.layers):
                log.warning("mp_agent does not measure this: %s", feature_of(collection.name))

    @property
    def unmatched(self) -> tuple[str, ...]:
        """What is not measured, in words, since no layer is in it."""
        return tuple(feature_of(name) for name, view in self.views.items() if not view.layers)


def feature_of(name: str) -> str:
    """Return in words that a collection is not measured."""
    return f"collection {name!r}, which matches no parameter"


def _after(
    known: CollectionView | None, collection: TensorCollection, sample: LayerObservation
) -> CollectionView:
    """Return a collection after a sample: one that does not count leaves its columns as they are.

    Layers of which nothing was measured, such as those of another optimizer, are left out.
    """
    view, family = known or CollectionView(), sample.layers.family
    members = [sample.views[i] for i in members_of(collection.patterns, sample.layers.names)]
    if family is GRADIENTS:
        nonfinite = sum(family.nonfinite_elements(layer.values) for layer in members)
        view = replace(view, layers=len(members), nonfinite_elements=nonfinite)
    measured = [layer for layer in members if layer.values.get(family.size)]
    if measured and all(layer.judged for layer in measured):
        values = _united(measured, family)
        if all(column in values for column in family.required):
            view = replace(view, families={**view.families, family.name: values})
    return view


def _united(layers: Sequence[LayerView], family: ColumnFamily) -> dict[str, float]:
    return family.merged(
        [[layer.values.get(name, nan) for name in family.names] for layer in layers]
    )


NAMES_AT_MOST = 64
"""Names that have series. A process watches no more, but ranks may watch different ones."""
_NAMES_KNOWN_AT_MOST = 10_000


@dataclass(slots=True, kw_only=True)
class TensorTracker(Tracker):
    """The columns of each tensor, of the last sample of which all ranks are there.

    Of tensors that only some ranks watch, as in a pipeline, the last sample of any.
    """

    rows: dict[str, Mapping[str, float]] = field(default_factory=dict)
    """Rows by name, in the order in which they came."""
    whole: dict[str, bool] = field(default_factory=dict)
    """By name, whether all ranks had the row."""
    beyond: dict[str, bool] = field(default_factory=dict)
    """The names that have no series, since there are too many."""
    since: dict[str, dict[str, int]] = field(default_factory=dict)
    """Threshold → name → step, counted in the attempt, of the first of consecutive samples beyond
    it."""
    steps: dict[str, dict[str, int]] = field(default_factory=dict)
    """Threshold → name → steps from there to the last sample; 0 if that is not beyond it."""

    def observe_layers(self, sample: LayerObservation, context: AccountContext) -> None:
        """Add the tensors of a sampled step."""
        if sample.layers.family.name == TENSORS.name:
            for view in sample.views:
                if self._add(view):
                    self._count(view, sample.sequence, context.thresholds)

    def view(self) -> TensorRows:
        """Return the columns by name, and how many names there are."""
        return TensorRows(
            columns=dict(self.rows),
            names=len(self.rows) + len(self.beyond),
            sustained_steps={limit: dict(own) for limit, own in self.steps.items()},
        )

    def _count(self, view: LayerView, sequence: int, thresholds: Mapping[str, float]) -> None:
        found = {
            "reduction_swallowed": swallowed_share_of_reduction(view.values),
            "dimension_imbalance": slice_imbalance(view.values),
        }
        for limit, value in found.items():
            since, steps = self.since.setdefault(limit, {}), self.steps.setdefault(limit, {})
            if value is not None and value > thresholds[limit]:
                steps[view.name] = sequence - since.setdefault(view.name, sequence)
            else:
                since.pop(view.name, None)
                steps[view.name] = 0

    def _add(self, view: LayerView) -> bool:
        """Take the row if it is to be shown."""
        if not view.values.get("elements"):
            return False
        if view.name not in self.rows and len(self.rows) >= NAMES_AT_MOST:
            if len(self.beyond) < _NAMES_KNOWN_AT_MOST:
                self.beyond[view.name] = True
        elif view.judged or not self.whole.get(view.name, False):
            self.rows[view.name], self.whole[view.name] = view.values, view.judged
            return True
        return False


SAMPLES_AT_LEAST = 8
"""Samples before which there is no past to compare with."""
SAMPLES_KEPT = 64
_RECENT = 3


@dataclass(slots=True, kw_only=True)
class LogitHistory:
    """Samples of a number over the whole attempt, and the last three of them."""

    kept: list[float] = field(default_factory=list)
    """Every `every`-th sample, oldest first."""
    every: int = 1
    samples: int = 0
    recent: list[float] = field(default_factory=list)

    def add(self, value: float) -> None:
        """Add a sample; when too many are kept, every other one is dropped."""
        if self.samples % self.every == 0:
            self.kept = [*self.kept, value]
        if len(self.kept) >= SAMPLES_KEPT:
            self.kept, self.every = self.kept[::2], 2 * self.every
        self.samples += 1
        self.recent = [*self.recent[1 - _RECENT :], value]

    @property
    def growth(self) -> float | None:
        """The last samples, divided by the earlier half of all; None while there are too few."""
        if self.samples < SAMPLES_AT_LEAST:
            return None
        earlier = median(self.kept[: len(self.kept) // 2])
        return min(max(median(self.recent) / max(earlier, 1.0), -LARGEST), LARGEST)


_ENTROPIES = 8
"""Compared steps of which a median is taken: a batch of rollouts alone has easy and hard ones."""
_UNCERTAIN = 0.1
"""Entropy in nats per token below which a policy, such as one that was distilled, can hardly lose
any."""


@dataclass(slots=True, kw_only=True)
class EntropyTracker(Tracker):
    """The entropy of a policy, its highest level, and for how many steps little of it is left.

    −log p of drawn tokens has the entropy as its mean where the trainer's policy drew them. Of
    densities it may be of any size and sign, and nothing follows from it.
    """

    latest: list[float] = field(default_factory=list)
    """At most `_ENTROPIES`, oldest first."""
    highest: float = 0.0
    densities: bool = False
    collapsed_steps: int | None = None
    """None before any log-probabilities, and of densities."""

    def observe(self, step: MergedStep, context: AccountContext) -> None:
        """Add a closed step, if log-probabilities of all ranks were compared on it."""
        row = step.families.get(LOGPROBS.name, {})
        entropy = policy_entropy(row)
        if entropy is None or not step.counts(LOGPROBS):
            return
        self.densities |= row.get("density_tokens", 0.0) > 0.0
        self.latest = [*self.latest[1 - _ENTROPIES :], entropy]
        if len(self.latest) == _ENTROPIES:
            self.highest = max(self.highest, median(self.latest))
        if self.densities:
            self.collapsed_steps = None
            return
        limit = context.thresholds["policy_entropy_fallen"] * self.highest
        low = self.highest >= _UNCERTAIN and median(self.latest) < limit
        self.collapsed_steps = (self.collapsed_steps or 0) + 1 if low else 0


@dataclass(slots=True, kw_only=True)
class LogitTracker(Tracker):
    """The largest attention logit and log-sum-exp of each sample, and the modules above the limit.

    Samples of a checkpoint that was resumed are a separate past.
    """

    attention: LogitHistory = field(default_factory=LogitHistory)
    logsumexp: LogitHistory = field(default_factory=LogitHistory)
    high: tuple[str, ...] = ()
    """Modules above the limit in the last sample, those with the largest logits first."""

    def observe(self, step: MergedStep, context: AccountContext) -> None:
        """Add a closed step, if it was sampled."""
        logit = step.families.get(ATTENTION.name, {}).get("logit_max")
        if logit is not None and step.counts(ATTENTION):
            self.attention.add(logit)
        size = _size(step.families.get(LOGITS.name, {}))
        if size is not None and step.counts(LOGITS):
            self.logsumexp.add(size)

    def observe_layers(self, sample: LayerObservation, context: AccountContext) -> None:
        """Note which modules are above the limit."""
        if sample.layers.family.name != ATTENTION.name:
            return
        limit = context.thresholds["attention_logit_high"]
        found = [(-view.values.get("logit_max", -LARGEST), view.name) for view in sample.views]
        self.high = tuple(name for logit, name in sorted(found) if -logit > limit)[:NAMED_AT_MOST]

    def view(self) -> LogitGrowth | None:
        """Return the growth of both; None before any was sampled."""
        if not self.attention.samples and not self.logsumexp.samples:
            return None
        recent = self.logsumexp.recent
        return LogitGrowth(
            attention_growth=self.attention.growth,
            logsumexp_size=recent[-1] if recent else None,
            logsumexp_growth=self.logsumexp.growth,
            high_names=self.high,
        )


def _size(row: Mapping[str, float]) -> float | None:
    """Return the largest magnitude of a log-sum-exp."""
    ends = [abs(row[name]) for name in ("logsumexp_max", "logsumexp_min") if name in row]
    return max(ends, default=None)
