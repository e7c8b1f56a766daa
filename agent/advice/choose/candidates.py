"""Which precisions are tried for a goal on some hardware, and which the hardware rules out."""

from collections.abc import Mapping

from mp_agent.advice.environment import Hardware

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
