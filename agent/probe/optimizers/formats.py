"""In which number formats a run keeps and computes its tensors, as far as they can be seen."""

from collections import Counter
from collections.abc import Sequence

import torch

from mp_agent.probe.optimizers.plan import MeasurementPlan
from mp_agent.records.schema import Layer
from mp_agent.ring.interruptions import pass_on

SHORT_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


def format_name(dtype: torch.dtype) -> str:
    """Return the usual short name of a format."""
    return SHORT_NAMES.get(dtype, str(dtype).removeprefix("torch."))


class GradientFormats:
    """How many elements of each format the gradients of each plan have.

    They are counted as a plan is measured, by the thread that makes its gradients: to read `grad`
    while the backward of another thread writes it would end the process.
    """

    def __init__(self) -> None:
        self._found: dict[str, tuple[Sequence[Layer], Counter[torch.dtype]]] = {}
        """By label, with the layers of the plan that it was of."""

    def note(self, plan: MeasurementPlan) -> None:
        """Count the gradients of a plan, unless that is done."""
        layers, elements = self._found.get(plan.label, ((), Counter()))
        if layers is not plan.layers or not elements:
            self._found[plan.label] = plan.layers, plan.gradient_formats()

    def of(self, plans: Sequence[MeasurementPlan]) -> Counter[torch.dtype]:
        """Return how many elements of each format the gradients of several plans have."""
        found = (self._found[plan.label][1] for plan in plans if plan.label in self._found)
        return sum(found, start=Counter[torch.dtype]())


def formats_of(
    plans: Sequence[MeasurementPlan], gradients: GradientFormats, autocast: torch.dtype | None
) -> tuple[tuple[str, str], ...]:
    """Return facts: formats of autocast, parameters, masters, gradients, and FP32 matrix products.

    Several formats of one kind are joined by a plus sign, that of most elements first.
    """
    masters = sum((plan.master_formats() for plan in plans), start=Counter[torch.dtype]())
    parameters = sum((plan.parameter_formats() for plan in plans), start=Counter[torch.dtype]())
    return (
        ("autocast_format", "" if autocast is None else format_name(autocast)),
        ("parameter_format", _formats(parameters)),
        ("master_format", _formats(masters)),
        ("gradient_format", _formats(gradients.of(plans))),
        ("matmul_format", _matmul_format()),
    )


def _formats(elements: Counter[torch.dtype]) -> str:
    return "+".join(format_name(dtype) for dtype, _ in elements.most_common())


def _matmul_format() -> str:
    """Return in what torch multiplies FP32 matrices: fp32, tf32, or bf16."""
    try:
        precision = torch.get_float32_matmul_precision()
    except Exception as error:  # settings of the old and the new kind were mixed
        pass_on(error)
        return ""
    return {"highest": "fp32", "high": "tf32", "medium": "bf16"}.get(precision, precision)
