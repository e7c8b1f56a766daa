"""Layers that stop learning: gradients that have died, or underflow more than they used to."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from mp_agent.node.account.medians import median
from mp_agent.records.health import TroubledLayers
from mp_agent.records.views import LayerView

EARLY_SAMPLES = 5
"""Samples whose median is a layer's own zero share: embeddings' untouched rows and ReLU's zeros
belong to it."""
LAYERS_AT_MOST = 50_000
NAMED_AT_MOST = 10
_ELEMENTS_AT_LEAST = 64
"""Of fewer elements a single zero is a large share."""
_EXPERT = re.compile(r"(?:^|\.)experts?(?:\.|$)")


@dataclass(slots=True, kw_only=True)
class LayerMemory:
    """What is remembered of each layer, column by column: plain data, it goes into the ledger."""

    names: list[str] = field(default_factory=list)
    early_zero_shares: list[list[float]] = field(default_factory=list)
    """The first samples; once they are EARLY_SAMPLES their median alone."""
    early_full: list[bool] = field(default_factory=list)
    underflowing: list[bool] = field(default_factory=list)
    dead_samples: list[int] = field(default_factory=list)
    """Samples in a row in which the layer had a gradient, but next to none."""
    zero_samples: list[int] = field(default_factory=list)
    """Samples in a row whose gradient was exactly 0, judged or not."""
    learns: list[bool] = field(default_factory=list)
    """Whether the layer ever had a gradient that was not 0."""
    sparse: list[bool] = field(default_factory=list)
    """Whether the layer is one that is not used on every step, as experts are."""


class LayerWatch:
    """Follows the layers of a run from sample to sample."""

    def __init__(self, memory: LayerMemory) -> None:
        self.memory = memory
        self._index = {name: index for index, name in enumerate(memory.names)}
        self._troubled: TroubledLayers | None = None
        """What `troubled` found since the last change: it is asked on every step."""

    def begin_attempt(self) -> None:
        """Forget the samples in a row; what is usual for a layer outlives a restart."""
        self._troubled = None
        layers = len(self.memory.names)
        self.memory.dead_samples = [0] * layers
        self.memory.zero_samples = [0] * layers
        self.memory.underflowing = [False] * layers

    def retire(self, names: Iterable[str]) -> None:
        """Forget names that stand for no layer any more."""
        for index in [self._index[name] for name in names if name in self._index]:
            self._troubled = None
            self.memory.dead_samples[index] = 0
            self.memory.underflowing[index] = False
            self.memory.early_zero_shares[index] = []
            self.memory.early_full[index] = False

    def fold(self, layers: Iterable[LayerView], thresholds: Mapping[str, float]) -> None:
        """Take the layers of a sampled step in; those whose norms do not count say nothing.

        Parameters without gradient have no elements: they say nothing either.
        """
        self._troubled = None
        for layer in layers:
            elements = layer.values.get("elements", 0.0)
            index = self._place(layer.name) if layer.judged and elements else None
            if index is not None:
                self._fold_gradient(index, layer.values["abs_max"], thresholds)
                if elements >= _ELEMENTS_AT_LEAST:
                    share = layer.values["zero_elements"] / elements
                    self._fold_zero_share(index, share, thresholds)

    def troubled(self, thresholds: Mapping[str, float]) -> TroubledLayers:
        """Return which layers are dead and which underflow."""
        if self._troubled is None:
            self._troubled = self._look(thresholds["layer_dead_samples"])
        return self._troubled

    def _look(self, samples: float) -> TroubledLayers:
        memory = self.memory
        dead = [
            name
            for name, row in zip(memory.names, memory.dead_samples, strict=True)
            if row >= samples
        ]
        under = [name for name, is_ in zip(memory.names, memory.underflowing, strict=True) if is_]
        judged = sum(memory.early_full)
        return TroubledLayers(
            dead=len(dead),
            dead_names=tuple(dead[:NAMED_AT_MOST]),
            underflowing_share=len(under) / judged if judged else None,
            underflowing_names=tuple(under[:NAMED_AT_MOST]),
        )

    def _fold_gradient(self, index: int, abs_max: float, thresholds: Mapping[str, float]) -> None:
        memory = self.memory
        if abs_max == 0.0:
            memory.zero_samples[index] += 1
        else:
            if 0 < memory.zero_samples[index] < thresholds["layer_dead_samples"]:
                memory.sparse[index] |= memory.learns[index]
            memory.zero_samples[index] = 0
            memory.learns[index] = True
        if abs_max >= thresholds["layer_dead_abs_max"] or self._unused(index, abs_max):
            memory.dead_samples[index] = 0
        else:
            memory.dead_samples[index] += 1

    def _fold_zero_share(self, index: int, share: float, thresholds: Mapping[str, float]) -> None:
        memory = self.memory
        if share == 1.0 and self._unused(index, 0.0):
            memory.underflowing[index] = False
        elif memory.early_full[index]:
            usual = memory.early_zero_shares[index][0]
            memory.underflowing[index] = share - usual > thresholds["layer_zero_rise"]
        else:
            early = [*memory.early_zero_shares[index], share]
            memory.early_full[index] = len(early) >= EARLY_SAMPLES
            memory.early_zero_shares[index] = [median(early)] if memory.early_full[index] else early

    def _unused(self, index: int, abs_max: float) -> bool:
        """Tell whether a gradient of exactly 0 means that the layer took no part in the step."""
        idle = self.memory.sparse[index] or not self.memory.learns[index]
        return abs_max == 0.0 and idle

    def _place(self, name: str) -> int | None:
        """Return a layer's index, a new one if need be; None when there are too many."""
        index = self._index.get(name)
        if index is None and len(self._index) < LAYERS_AT_MOST:
            index = self._index[name] = len(self._index)
            memory = self.memory
            memory.names.append(name)
            memory.early_zero_shares.append([])
            memory.early_full.append(False)
            memory.underflowing.append(False)
            memory.dead_samples.append(0)
            memory.zero_samples.append(0)
            memory.learns.append(False)
            memory.sparse.append(_EXPERT.search(name) is not None)
        return index
