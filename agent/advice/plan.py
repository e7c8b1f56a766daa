"""A precision plan: what to set, as `recommend` proposes it and `evaluate` measures it."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from math import isfinite
from typing import Any

from mp_agent.errors import AdviceError

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
    clip_norm: float | None = None
    """Largest gradient norm; None for no clipping."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """For `mp_agent.init`."""

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
            if not (isfinite(value) and value > 0):
                raise _wrong(name, value, "is not a positive number")
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


def plan_of_json(text: str) -> PrecisionPlan:
    """Return the plan that a JSON document holds, by itself or as `plan` of a recommendation.

    Raises AdviceError, naming the field and the value, for any other document.
    """
    try:
        document = json.loads(text)
    except ValueError as error:
        raise AdviceError(f"plan: is no JSON: {error}") from error
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
