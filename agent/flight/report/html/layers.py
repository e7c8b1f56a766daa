"""The bars of the worst layers."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import log10

from mp_agent.flight.postmortem.analysis import LayerSummary
from mp_agent.flight.report.text import number

_SHORTEST_PERCENT = 15.0
"""Of the smallest norm: a logarithm has no zero to start from."""


@dataclass(frozen=True, slots=True)
class LayerBar:
    """A layer's name, the length of its bar in percent, its class, and the text next to it."""

    name: str
    percent: float
    kind: str
    text: str


def layer_bars(layers: Sequence[LayerSummary]) -> list[LayerBar]:
    """Return a bar per layer: the share of NaN and Inf, or the norm on a logarithmic scale."""
    norms = [layer.norm for layer in layers if layer.norm > 0]
    low, high = (log10(min(norms)), log10(max(norms))) if norms else (0.0, 0.0)
    return [_bar(layer, low, high) for layer in layers]


def _bar(layer: LayerSummary, low: float, high: float) -> LayerBar:
    """Return the bar of a layer, given the logarithms of the smallest and largest norm."""
    if layer.nonfinite_elements > 0:
        share = layer.nonfinite_elements / max(layer.elements, 1.0)
        text = f"{layer.nonfinite_elements:.0f} of {layer.elements:.0f} NaN/Inf"
        return LayerBar(layer.name, round(100.0 * share, 1), "bad", text)
    if layer.norm <= 0:
        return LayerBar(layer.name, 0.0, "fine", "0")
    place = (log10(layer.norm) - low) / (high - low) if high > low else 1.0
    percent = _SHORTEST_PERCENT + (100.0 - _SHORTEST_PERCENT) * place
    return LayerBar(layer.name, round(percent, 1), "fine", number(layer.norm))
