"""What a training log must hold to judge a condition, and the thresholds that tuning may move."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from math import floor, log10

from mp_agent.catalog.thresholds import BY_NAME
from mp_agent.errors import CatalogError


class Quantity(Enum):
    """What a condition may need of a log; the value says what is missing without it."""

    LOSS = "the loss"
    GRAD_NORM = "the gradient norm"
    LEARNING_RATE = "the learning rate"
    LOSS_SCALE = "the loss scale"
    SKIPS = "which steps were skipped"
    CLIPPING = "the norm that clipping saw"
    SMALLEST = "the smallest gradient magnitude"
    LAYERS = "the gradients of layers"
    RANKS = "the numbers of each rank"
    BATCHES = "a comparison of batches"
    REPLICAS = "a comparison of replicas"
    LIFE = "when the run paused, restarted and ended, and why"
    AGENT = "the node agents' own account"
    CODE = "what a check of the code found"
    DISTRIBUTION = "how gradients are distributed"
    OPTIMIZER = "the weights' updates and the optimizer's state"
    LOOP = "the order of the loop's calls, and modes"
    ACTIVATIONS = "outputs of modules"
    LOGITS = "logits of attention and of the output"
    ROUTERS = "routers of mixtures of experts"
    FP8 = "amax and scales of delayed scaling"
    LOGPROBS = "log-probabilities of trainer and sampler"
    TENSORS = "watched tensors"
    BASELINE = "a baseline of good runs"


_DIGITS = 3
_WHOLE_UNITS = ("{step}", "{change}", "{sample}")
"""What is counted has no fractions."""


@dataclass(frozen=True, slots=True)
class Knob:
    """Thresholds that are moved together, by one factor, to make a condition less sensitive.

    raised: whether larger values are less sensitive.
    """

    names: tuple[str, ...]
    raised: bool = True

    def __post_init__(self) -> None:
        if unknown := set(self.names).difference(BY_NAME):
            raise CatalogError(f"{', '.join(sorted(unknown))} is no threshold")

    def moved(self, limits: Mapping[str, float], factor: float) -> dict[str, float]:
        """Return the thresholds, less sensitive by a factor above 1, more below it."""
        return {name: self._moved(name, limits[name], factor) for name in self.names}

    def _moved(self, name: str, value: float, factor: float) -> float:
        moved = value * factor if self.raised else value / factor
        unit = BY_NAME[name].unit
        if unit in _WHOLE_UNITS:
            # Rounded to the side that was asked for; never to nothing.
            steps = -int(-moved // 1) if moved > value else int(moved)
            return float(max(steps, 1))
        rounded = _rounded(moved, up=moved > value)
        return min(rounded, 1.0) if unit == "1" else rounded


def less_above(*names: str) -> Knob:
    """Return a knob whose larger values are less sensitive."""
    return Knob(names)


def less_below(*names: str) -> Knob:
    """Return a knob whose smaller values are less sensitive."""
    return Knob(names, raised=False)


def _rounded(value: float, *, up: bool) -> float:
    """Return a number with three digits, rounded to the side that was asked for."""
    unit = 10.0 ** (floor(log10(value)) - _DIGITS + 1)
    whole = floor(value / unit)
    close = abs(value - whole * unit) < 1e-9 * value
    return float(f"{(whole if close or not up else whole + 1) * unit:.6g}")
