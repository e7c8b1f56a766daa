"""What is chosen for each part of a plan, from what was measured."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil, floor, inf, isfinite, log2, log10
from statistics import median
from typing import Any

from mp_agent.catalog.guard import default_policies
from mp_agent.catalog.thresholds import DEFAULTS, resolve
from mp_agent.plan.precision_plan import AUTOCAST, DEFAULT_BETA2, Hardware, is_within
from mp_agent.plan.recommendation.model import (
    MatrixProduct,
    OddModule,
    SpeedEstimate,
    TrainingMemory,
)
from mp_agent.report.numbers import percent, size

FP16_LARGEST = 65504.0
_LOWEST = -25
"""A magnitude below 2^-25 is rounded to zero in FP16, whose smallest number is 2^-24."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExponentCounts:
    """Elements by floor(log2) of their magnitude."""

    counts: Mapping[int, int] = field(default_factory=dict)
    zeros: int = 0
    nonfinite: int = 0
    abs_max: float = 0.0
    """Largest finite magnitude."""

    @property
    def nonzero(self) -> int:
        """Return how many finite elements are not zero."""
        return sum(self.counts.values())

    @property
    def zero_ratio(self) -> float:
        """Return the share of finite elements that are zero; 0 for none at all."""
        return self.zeros / max(1, self.zeros + self.nonzero)

    def plus(self, other: "ExponentCounts") -> "ExponentCounts":
        """Return the counts of both."""
        counts = dict(self.counts)
        for exponent, count in other.counts.items():
            counts[exponent] = counts.get(exponent, 0) + count
        return ExponentCounts(
            counts=counts,
            zeros=self.zeros + other.zeros,
            nonfinite=self.nonfinite + other.nonfinite,
            abs_max=max(self.abs_max, other.abs_max),
        )

    def lost_ratio(self, loss_scale: float = 1.0) -> float:
        """Return the share of non-zero elements that FP16 rounds to zero, at a loss scale.

        A scale that is no power of two counts as the next lower one.
        """
        shift = floor(log2(loss_scale))
        lost = sum(count for exponent, count in self.counts.items() if exponent + shift < _LOWEST)
        return lost / max(1, self.nonzero)

    def quantile(self, share: float) -> float:
        """Return a lower bound, a power of two, of the quantile of magnitudes; inf for none."""
        wanted, seen = share * self.nonzero, 0
        for exponent in sorted(self.counts):
            seen += self.counts[exponent]
            if seen >= max(1.0, wanted):
                return 2.0**exponent
        return inf


_ORDERS: Mapping[str, tuple[str, ...]] = {
    "speed": ("bf16-autocast", "fp16-autocast", "tf32", "fp32"),
    "memory": ("bf16", "bf16-autocast", "fp16-autocast", "tf32", "fp32"),
    "stability": ("bf16-autocast", "tf32", "fp32"),
}
_FORMATS = {"bf16": "bf16", "bf16-autocast": "bf16", "fp16-autocast": "fp16", "tf32": "tf32"}


def candidates_for(goal: str) -> tuple[str, ...]:
    """Return the precisions of a goal, the preferred one first; FP32 is the last.

    BF16 comes before FP16: tensor cores are as fast, and it has FP32's range, so nothing overflows
    that does not in FP32. For stability FP16 is not tried.
    """
    return _ORDERS[goal]


def ruled_out(precision: str, goal: str, hardware: Hardware) -> str:
    """Return why the hardware has no use for a precision; "" where it has."""
    name = _FORMATS.get(precision)
    if name is None:
        return ""
    shown = name.upper()
    if hardware.kind == "cpu":
        return _ruled_out_on_cpu(precision, goal, hardware.formats.get(name), shown)
    supported = hardware.formats.get(name)
    if supported:
        return ""
    if supported is None:
        return f"whether {hardware.name} multiplies {shown} is not known"
    if hardware.tensor_cores is False:
        return f"{hardware.name} has no tensor cores: {shown} would hardly be faster than FP32"
    return f"the tensor cores of {hardware.name} do not multiply {shown}"


def _ruled_out_on_cpu(precision: str, goal: str, supported: bool | None, shown: str) -> str:
    if precision == "tf32":
        return "processors do not have TF32"
    if precision == "fp16-autocast":
        return "on processors, torch's FP16 is slower than BF16, and its range is smaller"
    if goal == "memory" or supported:
        return ""
    if supported is None:
        return f"whether this processor computes {shown} is not known"
    return f"this processor has no {shown} instructions: {shown} would be slower than FP32"


_TYPICAL = (2.0, 3.0)
"""Speed-up of mixed precision where all products use tensor cores: ResNet-50, BERT and GPT-2 train
2.8 to 2.9 times as fast (docs/recommend.md names the source)."""
_TF32 = (1.0, 2.0)
SOURCE = (
    "estimate by Amdahl's law: products that tensor cores can use become 2 to 3 times as fast, as "
    "published for ResNet-50, BERT and GPT-2; all else stays as it is"
)
_TF32_SOURCE = (
    "estimate by Amdahl's law: products that tensor cores can use become up to twice as fast in "
    "TF32; all else stays as it is"
)


def eligible_ratio(products: Sequence[MatrixProduct], keep_fp32: Collection[str] = ()) -> float:
    """Return the share of operations in 16-bit products whose dimensions are multiples of 8."""
    total = sum(one.flops for one in products)
    eligible = sum(
        one.flops for one in products if not one.odd and not is_within(one.module, keep_fp32)
    )
    return eligible / total if total else 0.0


def kept_ratio(products: Sequence[MatrixProduct], keep_fp32: Collection[str]) -> float:
    """Return the share of operations that are kept in FP32."""
    total = sum(one.flops for one in products)
    kept = sum(one.flops for one in products if is_within(one.module, keep_fp32))
    return kept / total if total else 0.0


def odd_modules(products: Sequence[MatrixProduct]) -> tuple[OddModule, ...]:
    """Return the modules with dimensions that are no multiple of 8, the largest share first."""
    total = sum(one.flops for one in products)
    found: dict[str, tuple[dict[int, None], int]] = {}
    for one in products:
        if one.odd:
            sizes, flops = found.setdefault(one.module, ({}, 0))
            sizes.update(dict.fromkeys(one.odd))
            found[one.module] = (sizes, flops + one.flops)
    modules = (
        OddModule(module=name, dimensions=tuple(sizes), flops_ratio=flops / total if total else 0.0)
        for name, (sizes, flops) in found.items()
    )
    return tuple(sorted(modules, key=lambda one: -one.flops_ratio))


def speed_estimate(
    precision: str,
    hardware: Hardware,
    products: Sequence[MatrixProduct],
    keep_fp32: Collection[str],
) -> SpeedEstimate | None:
    """Return the expected speed-up over FP32; None where there is no basis for one.

    With p the eligible share and s the speed-up of tensor cores: 1 / ((1 - p) + p / s).
    """
    if precision == "fp32" or hardware.kind != "cuda" or not hardware.tensor_cores:
        return None
    eligible = eligible_ratio(products, keep_fp32)
    least, most = _TF32 if precision == "tf32" else _TYPICAL
    return SpeedEstimate(
        least_ratio=1 / ((1 - eligible) + eligible / least),
        most_ratio=1 / ((1 - eligible) + eligible / most),
        eligible_ratio=eligible,
        source=_TF32_SOURCE if precision == "tf32" else SOURCE,
    )


def training_memory(
    precision: str, trained: int, frozen: int, cast_elements: int, activations_bytes: int
) -> TrainingMemory:
    """Return the bytes of a training step with Adam.

    trained, frozen: elements of parameters; cast_elements: of the parameters that autocast casts.
    Weights, gradients and both moments have 4 bytes each in FP32, and under autocast, which adds
    copies of 2 bytes; all have 2 bytes where the model is cast to BF16.
    """
    size = 2 if precision == "bf16" else 4
    return TrainingMemory(
        weights_bytes=size * (trained + frozen),
        casts_bytes=2 * cast_elements if precision in AUTOCAST else 0,
        gradients_bytes=size * trained,
        optimizer_bytes=2 * size * trained,
        activations_bytes=activations_bytes,
    )


HEADROOM = 4.0
"""Factor by which gradients may grow after the measured steps before they overflow."""
LARGEST = 2.0**24
"""Beyond it, nothing that FP16 loses matters next to the rounding of FP32 sums."""
LOST_MAX = 0.05
"""Share of lost gradients from which FP16 is not recommended; CLIP lost 5 to 20 % in FP16."""


def initial_scale(gradients: ExponentCounts) -> float:
    """Return the largest power of two at which no gradient overflows, with `HEADROOM`.

    gradients: of parameters and of module outputs, in FP32, unscaled. Between 2^-14, below which
    FP16 holds none of them, and `LARGEST`.
    """
    if gradients.abs_max <= 0:
        return LARGEST
    power = floor(log2(FP16_LARGEST / HEADROOM / gradients.abs_max))
    return float(min(LARGEST, max(2.0**-14, 2.0**power)))


DEFAULT_EPSILON = 1e-8
_SHARE = 0.01
_MARGIN = 10.0
_SMALLEST = 1e-15


def adam_epsilon(gradients: ExponentCounts) -> tuple[float, str]:
    """Return epsilon, and why.

    Adam divides by sqrt(v) + epsilon, where sqrt(v) is about the magnitude of the gradient: an
    epsilon above it takes the update away. It is torch's default unless more than 1 % of the
    parameters' gradients are below that; then a tenth of those.
    """
    low = gradients.quantile(_SHARE)
    if low >= DEFAULT_EPSILON:
        found = "no gradient is above zero" if low == inf else f"99 % of them are above {low:.1e}"
        return DEFAULT_EPSILON, (
            f"torch's default: the gradients that are not zero are larger ({found}), and it is "
            "above zero in the FP32 and BF16 state of Adam (in FP16 it would be 0)"
        )
    epsilon = max(_SMALLEST, 10.0 ** floor(log10(low / _MARGIN)))
    return epsilon, (
        f"1 % of the gradients that are not zero are below {2 * low:.1e}: torch's default of "
        f"{DEFAULT_EPSILON:g} would outweigh sqrt(v) there and take their updates away"
    )


_BETA2_IN_BF16 = 0.95


def adam_beta2(precision: str) -> tuple[float, str]:
    """Return Adam's second beta, and why.

    A step multiplies the second moment by beta2 and adds (1 - beta2) times the squared gradient.
    BF16 has 8 significant bits: a change by less than 2^-9 of a number, half of its spacing at
    least, is rounded away.
    """
    if precision != "bf16":
        return DEFAULT_BETA2, "torch's default: Adam's state is in FP32"
    return _BETA2_IN_BF16, (
        f"with torch's default of {DEFAULT_BETA2:g} a step changes the second moment by "
        f"{1 - DEFAULT_BETA2:.1g} of itself, less than the {2**-9:.2g} that BF16 rounds away: it "
        "would stand still"
    )


def guard_for(
    gradients: ExponentCounts, loss_scale: float | None
) -> tuple[dict[str, dict[str, float]], str]:
    """Return the policies for `mp_agent.init(guard=…)`, with parameters, and why.

    gradients: of the parameters. In FP16 the scale is kept where GradScaler may search, 4 halvings
    below the first one, and above what makes more than `LOST_MAX` of the gradients zero.
    """
    policies: dict[str, dict[str, float]] = {**{name: {} for name in default_policies()}}
    policies["request_checkpoint"] = {}
    why = (
        "updates with NaN or Inf are skipped, spikes of the norm clipped, a learning rate that "
        "jumps is held, and a checkpoint is asked for where trouble repeats"
    )
    if loss_scale is None:
        return policies, f"{why}; guard_dry_run=True only counts"
    floor = 1.0
    while floor < loss_scale / 16 and gradients.lost_ratio(floor) > LOST_MAX:
        floor *= 2
    policies |= {"raise_loss_scale": {"floor": floor}, "reset_loss_scale": {}}
    lost = percent(gradients.lost_ratio(floor))
    return policies, (
        f"{why}; the loss scale is kept at {floor:g} or above, where {lost} of the parameters' "
        "gradients underflow, and set back after a collapse; guard_dry_run=True only counts"
    )


def memory_problem(memory: TrainingMemory, available_bytes: int | None) -> str:
    """Return why a training step does not fit; "" where it does, or nothing is known."""
    if available_bytes is None or memory.total_bytes <= available_bytes:
        return ""
    return (
        f"a training step needs about {size(memory.total_bytes)}, and {size(available_bytes)} is "
        "there"
    )


REINFORCEMENT = (
    "in reinforcement learning the sampler's and the trainer's rounding add up over a sequence; "
    "FP16, with 8 times the precision of BF16, was reported to make their mismatch 24 times "
    "smaller (arXiv 2510.26788)"
)


def clip_norm(norms: Sequence[float], goal: str) -> tuple[float | None, str]:
    """Return the norm to clip at, and why; None where no norm is above zero.

    The largest measured one, rounded up to two digits: it clips none of the measured steps. For
    stability the median: it clips about half of them.
    """
    known = [norm for norm in norms if isfinite(norm) and norm > 0]
    if not known:
        return None, "no measured gradient norm is above zero"
    if goal == "stability":
        return rounded_up(median(known)), (
            f"the median of {len(known)} measured norms ({min(known):.3g} to {max(known):.3g}): "
            "bounds every update to the usual size"
        )
    return rounded_up(max(known)), (
        f"the largest of {len(known)} measured norms ({min(known):.3g} to {max(known):.3g}): "
        "clips spikes, and none of the measured steps"
    )


def rounded_up(value: float) -> float:
    """Return a positive number rounded up to two significant digits."""
    digits = 1 - floor(log10(value))
    scaled = ceil(value * 10.0**digits - 1e-9)
    return float(f"{scaled}e{-digits}")


_SCALE_PARTS = {"loss_scale_reduced": 4.0, "loss_scale_very_low": 64.0, "loss_scale_low": 512.0}
"""By what the initial scale is divided for each threshold, where the default is above that."""


def settings_for(norms: Sequence[float], loss_scale: float | None) -> dict[str, Any]:
    """Return the settings that this model needs; empty where the defaults fit.

    Thresholds of norms are moved where the usual norm of this model would fire them, and those of
    the loss scale where the initial one is already below them.
    """
    overrides = {**_norm_thresholds(norms), **_scale_thresholds(loss_scale)}
    if not overrides:
        return {}
    resolve(overrides)
    return {"thresholds": overrides}


def _norm_thresholds(norms: Sequence[float]) -> Mapping[str, float]:
    known = [norm for norm in norms if norm > 0]
    if not known:
        return {}
    usual, largest = median(known), max(known)
    if largest >= DEFAULTS["grad_norm_high"]:
        high = rounded_up(10 * largest)
        return {"grad_norm_high": high, "grad_norm_extreme": 10 * high}
    if usual <= DEFAULTS["grad_norm_low"]:
        low = usual / 10
        return {
            "grad_norm_low": _digits(low),
            "grad_norm_very_low": _digits(low / 10),
            "grad_norm_vanished": _digits(min(low / 100, DEFAULTS["grad_norm_vanished"])),
        }
    return {}


def _scale_thresholds(loss_scale: float | None) -> Mapping[str, float]:
    if loss_scale is None or loss_scale / 4 >= DEFAULTS["loss_scale_reduced"]:
        return {}
    parts = {name: loss_scale / part for name, part in _SCALE_PARTS.items()}
    floor = DEFAULTS["loss_scale_floor"]
    if parts["loss_scale_low"] <= floor:
        # So small a scale leaves no room for levels; the floor is then below all of them.
        parts["loss_scale_floor"] = parts["loss_scale_low"] / 2
    return {
        name: value if name == "loss_scale_floor" else min(value, DEFAULTS[name])
        for name, value in parts.items()
    }


def _digits(value: float) -> float:
    return float(f"{value:.1e}")
