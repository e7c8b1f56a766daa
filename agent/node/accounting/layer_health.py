"""Judges dead, underflowing and exploding layers from their sampled gradients.

Finds layers whose gradients have died, underflow or explode.
A layer is judged by its own first samples and by the other layers: gradients that were tiny from
the start (biases that a softmax cancels) or come and go (experts) have not died.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import sqrt

from mp_agent.node.accounting.tracker import AccountContext, LayerObservation, ModelTracker
from mp_agent.node.accounting.windows import median
from mp_agent.records.columns import DISTRIBUTION, GRADIENTS
from mp_agent.records.health import TroubledLayers
from mp_agent.records.views import LayerView


@dataclass(slots=True, kw_only=True)
class LayerHealthState:
    """One list per quantity, with an entry per layer. Plain data, stored in the ledger."""

    names: list[str] = field(default_factory=list)
    early_zero_shares: list[list[float]] = field(default_factory=list)
    """Shares of the first samples; once there are enough, only their median."""
    early_full: list[bool] = field(default_factory=list)
    underflowing: list[bool] = field(default_factory=list)
    dead_samples: list[int] = field(default_factory=list)
    """Consecutive samples in which the layer had a gradient, but next to none."""
    zero_samples: list[int] = field(default_factory=list)
    """Consecutive samples with a gradient of exactly 0, judged or not."""
    learns: list[bool] = field(default_factory=list)
    """Whether the layer ever had a nonzero gradient."""
    sparse: list[bool] = field(default_factory=list)
    """Whether the layer is not used on every step, as experts are."""
    early_abs_max: list[list[float]] = field(default_factory=list)
    """Largest magnitudes in the first samples with a gradient."""
    usual_norms: list[float] = field(default_factory=list)
    """Moving averages of the norms without exploded ones; 0 before the first."""
    exploding_samples: list[int] = field(default_factory=list)
    """Consecutive samples with a norm far above the usual one."""
    elements: list[float] = field(default_factory=list)
    flushed: list[bool] = field(default_factory=list)
    """Whether most of the gradient is below FP16's smallest number at the loss scale in force."""
    flush_known: list[bool] = field(default_factory=list)
    """Whether that was ever measured."""

    def add_layer(self, name: str, elements: float) -> None:
        """Append a layer without samples."""
        self.names.append(name)
        self.early_zero_shares.append([])
        self.early_full.append(False)
        self.underflowing.append(False)
        self.dead_samples.append(0)
        self.zero_samples.append(0)
        self.learns.append(False)
        self.sparse.append(False)
        self.early_abs_max.append([])
        self.usual_norms.append(0.0)
        self.exploding_samples.append(0)
        self.elements.append(elements)
        self.flushed.append(False)
        self.flush_known.append(False)

    def add_missing_columns(self) -> None:
        """Fill the columns that a ledger of an earlier version lacks."""
        layers = len(self.names)
        self.early_abs_max += [[] for _ in range(layers - len(self.early_abs_max))]
        for column in (self.usual_norms, self.elements):
            column += [0.0] * (layers - len(column))
        self.exploding_samples += [0] * (layers - len(self.exploding_samples))
        for flags in (self.flushed, self.flush_known):
            flags += [False] * (layers - len(flags))

    def begin_attempt(self) -> None:
        """Reset the consecutive samples; what is usual for a layer outlives a restart."""
        layers = len(self.names)
        self.dead_samples = [0] * layers
        self.zero_samples = [0] * layers
        self.underflowing = [False] * layers
        self.exploding_samples = [0] * layers
        self.flushed = [False] * layers

    def retire(self, index: int) -> None:
        """Drop the samples of a name that no longer stands for a layer."""
        self.dead_samples[index] = 0
        self.underflowing[index] = False
        self.early_zero_shares[index] = []
        self.early_full[index] = False
        self.early_abs_max[index] = []
        self.usual_norms[index] = 0.0
        self.exploding_samples[index] = 0
        self.flushed[index] = False
        self.flush_known[index] = False


ALIKE_AT_LEAST = 4
"""Minimal number of experts: layers of one size, within one block, that differ in a number."""
_NAMED = re.compile(r"expert|(?:^|[._])moe(?:[._]|$)", re.IGNORECASE)
_NUMBER = re.compile(r"\d+")


def may_be_idle(names: Sequence[str], elements: Sequence[float]) -> frozenset[int]:
    """Return the indices of layers that are experts, by name or because they are alike.

    Blocks of a model are alike too, but are not nested in a block: the number that differs must
    not be the first one in the name.
    """
    found = {index for index, name in enumerate(names) if _NAMED.search(name)}
    families: dict[tuple[str, int, str, float], list[int]] = defaultdict(list)
    for index, name in enumerate(names):
        for number in list(_NUMBER.finditer(name))[1:]:
            before, after = name[: number.start()], name[number.end() :]
            families[before, number.start(), after, elements[index]].append(index)
    for alike in families.values():
        if len(alike) >= ALIKE_AT_LEAST:
            found.update(alike)
    return frozenset(found)


EARLY_SAMPLES = 5
"""Samples whose median is a layer's own zero share, such as untouched embedding rows and ReLU
zeros."""
LAYERS_AT_MOST = 50_000
NAMED_AT_MOST = 10
_ELEMENTS_AT_LEAST = 64
"""With fewer elements a single zero is a large share."""
_SPARSE_SHARE = 0.5
"""Zero share in the first samples above which a layer is sparse by nature, as embeddings are."""
_ZEROS_AT_LEAST = 14
"""Samples of exact zeros before they count, in a layer whose first samples were few: a head may be
used on some steps alone, such as that of a detector for objects of one size."""
_NEGLIGIBLE = 2e-5
"""Share of the other layers' gradients below which a layer's own is rounding noise. That of biases
before batch normalization is up to 1e-5 in FP32."""
_ADOPTED_SHARE = 0.1
"""Weight of the newest norm in a layer's moving average."""


@dataclass
class LayerHealth(ModelTracker):
    """Tracks the layers of a run from sample to sample. Only `memory` is stored."""

    memory: LayerHealthState = field(default_factory=LayerHealthState)

    def __post_init__(self) -> None:
        memory = self.memory
        memory.add_missing_columns()
        self._index = {name: index for index, name in enumerate(memory.names)}
        self._troubled: TroubledLayers | None = None
        """Cached result of `troubled`, which is called on every step."""
        self._negligible = 0.0
        """Early magnitude below which a layer had only rounding noise."""
        self._names_known = 0
        self._idle_layers: frozenset[int] = frozenset()

    def observe_layers(self, sample: LayerObservation, context: AccountContext) -> None:
        """Add the layers' gradients on a sampled step."""
        if sample.layers.family is GRADIENTS:
            self.retire(sample.layers.retired)
            self.fold(sample.views, context.thresholds)
        elif sample.layers.family is DISTRIBUTION:
            self.fold_flushed(sample.views, context.thresholds)

    def view(self, context: AccountContext) -> TroubledLayers | None:
        """Return the layers in trouble; None before any layer was sampled."""
        return self.troubled(context.thresholds) if self.memory.names else None

    def next_attempt(self) -> "LayerHealth":
        """Reset the consecutive samples; what is usual for a layer outlives a restart."""
        self._troubled = None
        self.memory.begin_attempt()
        return self

    def retire(self, names: Iterable[str]) -> None:
        """Drop names that no longer stand for a layer."""
        for index in [self._index[name] for name in names if name in self._index]:
            self._troubled = None
            self.memory.retire(index)

    def fold(self, layers: Iterable[LayerView], thresholds: Mapping[str, float]) -> None:
        """Add the layers of a sampled step; layers whose norms do not count are ignored.

        So are parameters without gradient, which have no elements.
        """
        self._troubled = None
        seen: list[tuple[int, LayerView]] = []
        for layer in layers:
            elements = layer.values.get("elements", 0.0)
            index = self._place(layer.name, elements) if layer.judged and elements else None
            if index is not None:
                seen.append((index, layer))
        if not seen:
            return
        self._note_magnitudes(seen)
        growth = self._growth(seen)
        for index, layer in seen:
            self._fold_gradient(index, layer.values["abs_max"], thresholds)
            self._fold_norm(index, sqrt(layer.values["sum_squares"]), growth, thresholds)
            elements = layer.values["elements"]
            if elements >= _ELEMENTS_AT_LEAST:
                share = layer.values["zero_elements"] / elements
                self._fold_zero_share(index, share, thresholds)

    def fold_flushed(self, layers: Iterable[LayerView], thresholds: Mapping[str, float]) -> None:
        """Add how much of each layer FP16 would lose at the loss scale; none without a scale."""
        self._troubled = None
        for layer in layers:
            flushed, elements = layer.values.get("flushed_elements"), layer.values["elements"]
            index = self._index.get(layer.name)
            if (
                layer.judged
                and elements >= _ELEMENTS_AT_LEAST
                and not (flushed is None or index is None)
            ):
                self.memory.flushed[index] = flushed / elements > thresholds["layer_flushed"]
                self.memory.flush_known[index] = True

    def troubled(self, thresholds: Mapping[str, float]) -> TroubledLayers:
        """Return which layers are dead and which underflow."""
        if self._troubled is None:
            self._troubled = self._find_troubled(thresholds["layer_dead_samples"])
        return self._troubled

    def _find_troubled(self, samples: float) -> TroubledLayers:
        memory = self.memory
        dead = [
            name
            for name, row in zip(memory.names, memory.dead_samples, strict=True)
            if row >= samples and not self._cancels(name)
        ]
        under = [
            name
            for name, *is_ in zip(memory.names, memory.underflowing, memory.flushed, strict=True)
            if any(is_)
        ]
        exploding = [
            name
            for name, row in zip(memory.names, memory.exploding_samples, strict=True)
            if row >= samples
        ]
        judged = sum(map(any, zip(memory.early_full, memory.flush_known, strict=True)))
        return TroubledLayers(
            dead=len(dead),
            dead_names=tuple(dead[:NAMED_AT_MOST]),
            underflowing_share=len(under) / judged if judged else None,
            underflowing_names=tuple(under[:NAMED_AT_MOST]),
            exploding=len(exploding),
            exploding_names=tuple(exploding[:NAMED_AT_MOST]),
        )

    def _note_magnitudes(self, seen: Iterable[tuple[int, LayerView]]) -> None:
        """Remember the magnitudes of each layer's first samples with a gradient."""
        for index, layer in seen:
            early, abs_max = self.memory.early_abs_max[index], layer.values["abs_max"]
            if abs_max > 0.0 and len(early) < EARLY_SAMPLES:
                self.memory.early_abs_max[index] = [*early, abs_max]
        firsts = [max(early) for early in self.memory.early_abs_max if early]
        self._negligible = _NEGLIGIBLE * median(firsts) if firsts else 0.0

    def _early(self, index: int) -> float:
        """Return the layer's largest early magnitude; 0 if it never had a gradient."""
        return max(self.memory.early_abs_max[index], default=0.0)

    def _growth(self, seen: Iterable[tuple[int, LayerView]]) -> float:
        """Return the median ratio of the layers' norms to their usual ones; at least 1.

        Of an even number the lower of the two: of two layers, that of the one that is calm.
        """
        usual = self.memory.usual_norms
        factors = [
            sqrt(layer.values["sum_squares"]) / usual[index]
            for index, layer in seen
            if usual[index] > 0.0
        ]
        return max(1.0, sorted(factors)[(len(factors) - 1) // 2]) if factors else 1.0

    def _fold_gradient(self, index: int, abs_max: float, thresholds: Mapping[str, float]) -> None:
        memory = self.memory
        if abs_max == 0.0:
            memory.zero_samples[index] += 1
        else:
            if memory.zero_samples[index]:
                memory.sparse[index] |= memory.learns[index]
            memory.zero_samples[index] = 0
            memory.learns[index] = True
        small = abs_max < thresholds["layer_dead_abs_max"]
        fallen = abs_max <= thresholds["layer_fall"] * self._early(index)
        used = not self._unused(index, abs_max) and not self._perhaps_unused(index, abs_max)
        if small and fallen and self._matters(index) and used:
            memory.dead_samples[index] += 1
        else:
            memory.dead_samples[index] = 0

    def _matters(self, index: int) -> bool:
        """Return whether the layer's first gradients were more than rounding noise."""
        return self._early(index) > self._negligible

    def _cancels(self, name: str) -> bool:
        """Return whether a bias alone has no gradient, since the loss has come not to depend on it.

        As that of a critic which adds it to both scores that it compares.
        """
        module, _, kind = name.rpartition(".")
        weight = self._index.get(f"{module}.weight") if kind == "bias" else None
        return weight is not None and not self.memory.dead_samples[weight]

    def _fold_norm(
        self, index: int, norm: float, growth: float, thresholds: Mapping[str, float]
    ) -> None:
        memory, usual = self.memory, self.memory.usual_norms[index]
        settled = len(memory.early_abs_max[index]) >= EARLY_SAMPLES
        judged = settled and usual > 0.0 and self._judged_for_explosion(index)
        if judged and norm > thresholds["layer_growth"] * growth * usual:
            memory.exploding_samples[index] += 1
            return
        memory.exploding_samples[index] = 0
        if norm > 0.0:
            memory.usual_norms[index] = usual + _ADOPTED_SHARE * (norm - usual) if usual else norm

    def _judged_for_explosion(self, index: int) -> bool:
        """Return whether, in addition, the layer has a gradient on every step."""
        return self._matters(index) and not self.memory.sparse[index]

    def _fold_zero_share(self, index: int, share: float, thresholds: Mapping[str, float]) -> None:
        memory = self.memory
        zeros = memory.zero_samples[index]
        unused_lately = memory.early_full[index] and zeros < thresholds["layer_dead_samples"]
        if share == 1.0 and (self._unused(index, 0.0) or unused_lately):
            memory.underflowing[index] = False
        elif memory.early_full[index]:
            usual = memory.early_zero_shares[index][0]
            risen = share - usual > thresholds["layer_zero_rise"]
            memory.underflowing[index] = risen and usual <= _SPARSE_SHARE
        else:
            early = [*memory.early_zero_shares[index], share]
            memory.early_full[index] = len(early) >= EARLY_SAMPLES
            memory.early_zero_shares[index] = [median(early)] if memory.early_full[index] else early

    def _unused(self, index: int, abs_max: float) -> bool:
        """Return whether a gradient of exactly 0 means that the step did not use the layer."""
        if abs_max != 0.0:
            return False
        return self.memory.sparse[index] or not self.memory.learns[index] or self._idle(index)

    def _perhaps_unused(self, index: int, abs_max: float) -> bool:
        """Return whether it is not known yet if a gradient of exactly 0 means that."""
        settled = len(self.memory.early_abs_max[index]) >= EARLY_SAMPLES
        return abs_max == 0.0 and not settled and self.memory.zero_samples[index] < _ZEROS_AT_LEAST

    def _idle(self, index: int) -> bool:
        """Return whether the layer is an expert, which only some steps use."""
        if self._names_known != len(self.memory.names):
            self._names_known = len(self.memory.names)
            self._idle_layers = may_be_idle(self.memory.names, self.memory.elements)
        return index in self._idle_layers

    def _place(self, name: str, elements: float) -> int | None:
        """Return a layer's index, adding it if necessary; None if there are too many."""
        index = self._index.get(name)
        if index is None and len(self._index) < LAYERS_AT_MOST:
            index = self._index[name] = len(self._index)
            self.memory.add_layer(name, elements)
        return index
