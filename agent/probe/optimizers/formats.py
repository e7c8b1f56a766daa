"""In which number formats a run keeps and computes its tensors, as far as they can be seen."""

from collections import Counter
from collections.abc import Iterable, Sequence

import torch

from mp_agent.probe.optimizers.plan import MeasurementPlan
from mp_agent.ring.interruptions import pass_on

SHORT_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


def format_name(dtype: torch.dtype) -> str:
    """Return the usual short name of a format."""
    return SHORT_NAMES.get(dtype, str(dtype).removeprefix("torch."))


def formats_of(
    plans: Sequence[MeasurementPlan], autocast: torch.dtype | None
) -> tuple[tuple[str, str], ...]:
    """Return facts: formats of autocast, parameters, gradients, and of FP32 matrix products.

    Several formats of one kind are joined by a plus sign, that of most elements first.
    """
    tensors = [slot.parameter for plan in plans for slot in plan.slots]
    gradients = [each.grad for each in tensors if each.grad is not None]
    return (
        ("autocast_format", "" if autocast is None else format_name(autocast)),
        ("parameter_format", _formats(tensors)),
        ("gradient_format", _formats(gradients)),
        ("matmul_format", _matmul_format()),
    )


def _formats(tensors: Iterable[torch.Tensor]) -> str:
    elements: Counter[torch.dtype] = Counter()
    for tensor in tensors:
        elements[tensor.dtype] += tensor.numel()
    return "+".join(format_name(dtype) for dtype, _ in elements.most_common())


def _matmul_format() -> str:
    """Return in what torch multiplies FP32 matrices: fp32, tf32, or bf16."""
    try:
        precision = torch.get_float32_matmul_precision()
    except Exception as error:  # settings of the old and the new kind were mixed
        pass_on(error)
        return ""
    return {"highest": "fp32", "high": "tf32", "medium": "bf16"}.get(precision, precision)
