"""A plan of precisions, the number formats it chooses from, and the environment that it is for."""

import json
import sys
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from mp_agent.errors import AdviceError, CompareError, SourceError
from mp_agent.inputs.files import parse_json


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


Capability = tuple[int, int]
"""Compute capability of an NVIDIA GPU: (8, 0) is an A100."""

TENSOR_CORES = (7, 0)
FORMATS: Mapping[str, Capability] = {
    "fp16": (7, 0),
    "bf16": (8, 0),
    "tf32": (8, 0),
    "fp8": (8, 9),
}
"""The first compute capability whose tensor cores multiply a format (CUDA C++ Programming Guide,
"Arithmetic Instructions" and "Tensor Core" of each capability)."""

_WITHOUT_TENSOR_CORES = ("GTX 16", "MX450", "T500", "T600")
"""Turing GPUs that have none in spite of compute capability 7.5."""

_CPU_FLAGS: Mapping[str, frozenset[str]] = {
    "fp16": frozenset({"avx512_fp16", "amx_fp16", "asimdhp"}),
    "bf16": frozenset({"avx512_bf16", "amx_bf16", "bf16"}),
}
"""Flags in /proc/cpuinfo of processors that compute in a format."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """What computes. None means what is not known, and is never guessed."""

    kind: str
    """`cuda` or `cpu`: the device that the plan is for."""
    name: str
    detected: bool = True
    """False for a GPU that is not here: a compute capability was given."""
    devices: int = 1
    compute_capability: Capability | None = None
    tensor_cores: bool | None = None
    formats: Mapping[str, bool | None]
    """Whether it multiplies `fp16`, `bf16`, `tf32` and `fp8` in hardware."""
    memory_bytes: int | None = None
    memory_free_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """Hardware, versions, and the settings of matrix products in force."""

    hardware: Hardware
    versions: Mapping[str, str | None]
    """Versions of torch, Python, CUDA, cuDNN, NCCL and the driver; None for what is not there."""
    products: Mapping[str, str | bool]
    """Settings of torch for matrix products and convolutions."""
    notes: tuple[str, ...] = ()


def formats_of_gpu(capability: Capability, name: str) -> dict[str, bool | None]:
    """Return which formats the tensor cores of an NVIDIA GPU multiply."""
    if not has_tensor_cores(capability, name):
        return dict.fromkeys(FORMATS, False)
    return {one: capability >= first for one, first in FORMATS.items()}


def has_tensor_cores(capability: Capability, name: str) -> bool:
    """Return whether an NVIDIA GPU has tensor cores."""
    return capability >= TENSOR_CORES and not any(one in name for one in _WITHOUT_TENSOR_CORES)


def formats_of_cpu(flags: frozenset[str] | None) -> dict[str, bool | None]:
    """Return which formats a processor computes in; flags: None where they cannot be read."""
    sixteen = {
        name: None if flags is None else bool(flags & known) for name, known in _CPU_FLAGS.items()
    }
    return {**sixteen, "tf32": False, "fp8": False}


def gpu_of_capability(capability: Capability) -> Hardware:
    """Return a GPU that is known by its compute capability alone."""
    text = f"compute capability {capability[0]}.{capability[1]}"
    return Hardware(
        kind="cuda",
        name=text,
        detected=False,
        compute_capability=capability,
        tensor_cores=has_tensor_cores(capability, text),
        formats=formats_of_gpu(capability, text),
    )


FORMAT = "mp_agent precision plan"
VERSION = 1
"""Rises when a key changes its meaning or goes; keys may be added without it."""

PRECISIONS: Mapping[str, str] = {
    "fp32": "FP32 throughout",
    "tf32": "weights and sums in FP32, operands of matrix products in TF32",
    "fp16-autocast": "torch.autocast with float16, weights in FP32",
    "bf16-autocast": "torch.autocast with bfloat16, weights in FP32",
    "bf16": "model.to(bfloat16): weights, gradients and optimizer state in BF16",
}
AUTOCAST: Mapping[str, str] = {"fp16-autocast": "float16", "bf16-autocast": "bfloat16"}
"""The dtype of torch.autocast in those that use it."""

DEVICES = ("cuda", "cpu")
GOALS = ("speed", "memory", "stability")
DEFAULT_BETA2 = 0.999
"""AdamW's own, in torch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecisionPlan:
    """Precision, loss scale, modules in FP32, epsilon and clipping of a training.

    Raises AdviceError, naming field and value, for one that cannot be used.
    """

    precision: str
    """One of `PRECISIONS`."""
    device: str
    loss_scale: float | None = None
    """Initial scale of GradScaler; None for no scaler."""
    keep_fp32: tuple[str, ...] = ()
    """Modules that run in FP32 within autocast; `(loss)` stands for the loss function."""
    adam_epsilon: float = 1e-8
    adam_beta2: float = DEFAULT_BETA2
    clip_norm: float | None = None
    """Largest gradient norm; None for no clipping."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Arguments for `mp_agent.init`."""

    def __post_init__(self) -> None:
        if self.precision not in PRECISIONS:
            raise _wrong("precision", self.precision, f"is none of {', '.join(PRECISIONS)}")
        if self.device not in DEVICES:
            raise _wrong("device", self.device, f"is none of {', '.join(DEVICES)}")
        for name in ("loss_scale", "clip_norm", "adam_epsilon"):
            value = getattr(self, name)
            if value is None and name != "adam_epsilon":
                continue
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise _wrong(name, value, "is not a number")
            if not 0 < value <= sys.float_info.max:  # an integer of JSON may be larger
                raise _wrong(name, value, "is not a positive number")
        if isinstance(self.adam_beta2, bool) or not isinstance(self.adam_beta2, int | float):
            raise _wrong("adam_beta2", self.adam_beta2, "is not a number")
        if not 0 <= self.adam_beta2 < 1:
            raise _wrong("adam_beta2", self.adam_beta2, "is not from 0 to below 1")
        if self.loss_scale is not None and self.precision != "fp16-autocast":
            raise _wrong("loss_scale", self.loss_scale, f"is not for {self.precision}")
        if not all(isinstance(name, str) and name for name in self.keep_fp32):
            raise _wrong("keep_fp32", self.keep_fp32, "is not a list of names of modules")
        if self.keep_fp32 and self.precision not in AUTOCAST:
            raise _wrong("keep_fp32", self.keep_fp32, f"is not for {self.precision}")

    def as_dict(self) -> dict[str, Any]:
        """Return the plan as plain values."""
        return {"format": FORMAT, "version": VERSION, **asdict(self)}

    def as_json(self) -> str:
        """Return the plan as JSON, which `plan_of_json` reads."""
        return json.dumps(self.as_dict(), indent=2, allow_nan=False)


def is_within(name: str, modules: Collection[str]) -> bool:
    """Return whether a module is one of `modules` or inside of one."""
    parts = name.split(".")
    return any(".".join(parts[:end]) in modules for end in range(1, len(parts) + 1))


def plan_of_json(text: str) -> PrecisionPlan:
    """Return the plan that a JSON document holds, by itself or as `plan` of a recommendation.

    Raises AdviceError, naming the field and the value, for any other document.
    """
    try:
        document = parse_json(text)
    except SourceError as error:
        raise AdviceError(f"plan: {error}") from error
    if isinstance(document, dict) and isinstance(document.get("plan"), dict):
        document = document["plan"]
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise AdviceError(f"plan: has no format {FORMAT!r}")
    if document.get("version") != VERSION:
        raise _wrong("version", document.get("version"), f"is not {VERSION}")
    known = {one.name for one in fields(PrecisionPlan)}
    for name in document.keys() - known - {"format", "version"}:
        raise _wrong(name, document[name], "is unknown")
    for name in ("precision", "device"):
        if not isinstance(document.get(name), str):
            raise _wrong(name, document.get(name), "is not a text")
    keep = document.get("keep_fp32", [])
    if not isinstance(keep, list):
        raise _wrong("keep_fp32", keep, "is not a list of names of modules")
    settings = document.get("settings", {})
    if not isinstance(settings, dict):
        raise _wrong("settings", settings, "is not a mapping")
    values = {name: document[name] for name in known & document.keys()}
    return PrecisionPlan(**{**values, "keep_fp32": tuple(keep)})


def _wrong(name: str, value: Any, problem: str) -> AdviceError:
    return AdviceError(f"plan: {name} has value {value!r}, which {problem}")
