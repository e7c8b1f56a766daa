"""Number formats and the candidates that are compared with the reference."""

from collections.abc import Iterable
from dataclasses import dataclass

from mp_agent.errors import CompareError


@dataclass(frozen=True, slots=True)
class NumberFormat:
    """A binary floating-point format."""

    name: str
    significand_bits: int
    """Bits of the significand, with the implicit one."""
    exponent_min: int
    """Exponent of the smallest normal number."""
    largest: float

    @property
    def unit_roundoff(self) -> float:
        """The largest relative error of rounding to nearest, of a normal number."""
        return 2.0**-self.significand_bits

    @property
    def smallest_normal(self) -> float:
        """The smallest positive normal number."""
        return 2.0**self.exponent_min


FP64 = NumberFormat("fp64", 53, -1022, 1.7976931348623157e308)
FP32 = NumberFormat("fp32", 24, -126, 3.4028234663852886e38)
FP16 = NumberFormat("fp16", 11, -14, 65504.0)
BF16 = NumberFormat("bf16", 8, -126, 3.3895313892515355e38)
TF32 = NumberFormat("tf32", 11, -126, 3.4011621342146535e38)
FP8_E4M3 = NumberFormat("fp8-e4m3", 4, -6, 448.0)
FP8_E5M2 = NumberFormat("fp8-e5m2", 3, -14, 57344.0)

REFERENCES = {one.name: one for one in (FP32, FP64)}


@dataclass(frozen=True, slots=True)
class Candidate:
    """A precision that is compared with the reference."""

    name: str
    format: NumberFormat
    """The format whose error is measured."""
    autocast: NumberFormat | None = None
    """What torch.autocast computes in; None without autocast."""
    meaning: str = ""

    @property
    def rounds_operands(self) -> bool:
        """Whether operands of matrix products are rounded, since torch has no kernels for it."""
        return self.format in (TF32, FP8_E4M3, FP8_E5M2)

    @property
    def casts_model(self) -> bool:
        """Whether weights and inputs are cast, as `model.to(dtype)` does."""
        return self.autocast is None and not self.rounds_operands


_OPERANDS = "operands of matrix products and convolutions rounded to {}, sums in FP32"
_SCALED = f"{_OPERANDS}; each tensor is scaled by a power of two to its own largest magnitude"

CANDIDATES = (
    Candidate("fp16-autocast", FP16, FP16, "torch.autocast with float16, weights in FP32"),
    Candidate("bf16-autocast", BF16, BF16, "torch.autocast with bfloat16, weights in FP32"),
    Candidate("fp16", FP16, None, "model.to(float16): weights, buffers, inputs, loss"),
    Candidate("bf16", BF16, None, "model.to(bfloat16): weights, buffers, inputs, loss"),
    Candidate("tf32", TF32, None, _OPERANDS.format("10 fraction bits")),
    Candidate("fp8-e4m3", FP8_E4M3, None, _SCALED.format("E4M3")),
    Candidate("fp8-e5m2", FP8_E5M2, None, _SCALED.format("E5M2")),
    Candidate("fp8-e4m3-autocast", FP8_E4M3, BF16, f"bf16-autocast, with {_SCALED.format('E4M3')}"),
    Candidate("fp8-e5m2-autocast", FP8_E5M2, BF16, f"bf16-autocast, with {_SCALED.format('E5M2')}"),
)
BY_NAME = {candidate.name: candidate for candidate in CANDIDATES}
DEFAULT_NAMES = tuple(one.name for one in CANDIDATES[:7])

_BY_TORCH_NAME = {
    "torch.float16": ("fp16-autocast", "fp16"),
    "torch.bfloat16": ("bf16-autocast", "bf16"),
    "torch.float8_e4m3fn": ("fp8-e4m3", "fp8-e4m3-autocast"),
    "torch.float8_e5m2": ("fp8-e5m2", "fp8-e5m2-autocast"),
}
"""A dtype of torch stands for the candidates with and without autocast."""


def candidates_of(dtypes: Iterable[object]) -> tuple[Candidate, ...]:
    """Return the candidates that names or torch dtypes stand for, each once, in order.

    Raises CompareError, naming the value, for one that does not exist, and for none at all.
    """
    names: dict[str, None] = {}
    for dtype in [dtypes] if isinstance(dtypes, str) else dtypes:
        for name in _BY_TORCH_NAME.get(str(dtype), (str(dtype).lower(),)):
            if name not in BY_NAME:
                raise CompareError(f"dtypes: {dtype!s} is none of {', '.join(BY_NAME)}")
            names[name] = None
    if not names:
        raise CompareError("dtypes: names no precision to compare")
    return tuple(BY_NAME[name] for name in names)


def reference_of(name: object) -> NumberFormat:
    """Return the format of a reference: `fp32`, `fp64` or the dtype of torch.

    Raises CompareError, naming the value, for another one.
    """
    known = {"torch.float32": "fp32", "torch.float64": "fp64"}.get(str(name), str(name).lower())
    if known not in REFERENCES:
        raise CompareError(f"reference: {name!s} is none of {', '.join(REFERENCES)}")
    return REFERENCES[known]
