"""Facts about the run: formats, optimizer and strategy."""

import os
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from mp_agent.probe.optimizers.plan import MeasurementPlan
from mp_agent.probe.processes.launchers import describe_ranks
from mp_agent.probe.step.measurement import GradientFormats
from mp_agent.records.schema import DATA_RANKS_FACT, TRAINED_RATIO
from mp_agent.records.tensor_collections import FACT as COLLECTIONS_FACT
from mp_agent.ring.interruptions import pass_on

SHORT_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


def format_name(dtype: torch.dtype) -> str:
    """Return the usual short name of a format."""
    return SHORT_NAMES.get(dtype, str(dtype).removeprefix("torch."))


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


_PATH_LENGTH_MAX = 4096


@dataclass(slots=True)
class ObservedTraits:
    """Facts of the run that the hooks have observed."""

    autocast_dtype: torch.dtype | None = None
    gradient_formats: GradientFormats = field(default_factory=GradientFormats)
    scaler_name: str = ""
    measuring_point: str = "optimizer_step"
    reduced_by_ddp: bool = False
    fp8_library: str = ""
    """Which library casts layers to FP8."""
    script: str = ""
    """The main script, for the node agent to check; empty: it is not to be checked."""
    collections: str = ""
    """The tensor collections that the script has defined; empty: none."""
    parameters: dict[str, str] = field(default_factory=dict)
    """Names of parameters that looks have found to be in trouble, by the name of the fact."""
    trained_ratio: Callable[[], str] = str
    """Returns the share of the model's elements that are trained; empty where it is not known."""
    backward_threads: set[int] = field(default_factory=set)
    """Threads that have begun a backward."""


def facts_of(
    plans: Sequence[MeasurementPlan], traits: ObservedTraits
) -> tuple[tuple[str, str], ...]:
    """Return the schema's facts."""
    first = plans[0]
    strategies = {plan.strategy for plan in plans}
    trained = ((TRAINED_RATIO, ratio),) if (ratio := traits.trained_ratio()) else ()
    script = (("script", traits.script),) if traits.script else ()
    collections = ((COLLECTIONS_FACT, traits.collections),) if traits.collections else ()
    data = max((plan.data_ranks for plan in plans), key=len)
    data_ranks = ((DATA_RANKS_FACT, describe_ranks(data)),) if len(data) > 1 else ()
    return (
        ("strategy", strategies.pop() if len(strategies) == 1 else "mixed"),
        ("precision", format_name(traits.autocast_dtype or first.compute_dtype)),
        ("scaler", traits.scaler_name),
        ("measuring_point", traits.measuring_point),
        ("device", str(first.device)),
        ("gpu_uuid", _gpu_uuid(first.device)),
        *script,
        *collections,
        *data_ranks,
        *formats_of(plans, traits.gradient_formats, traits.autocast_dtype),
        ("fp8_library", traits.fp8_library),
        *trained,
        *traits.parameters.items(),
        *_zero_epsilon(plans),
    )


def _zero_epsilon(plans: Sequence[MeasurementPlan]) -> tuple[tuple[str, str], ...]:
    """Return the first optimizer with an epsilon that is zero in its state's format."""
    found = [pair for plan in plans for pair in plan.zero_epsilons]
    if not found:
        return ()
    name, epsilon = found[0]
    return (("zero_epsilon_optimizer", name), ("zero_epsilon", epsilon))


def main_script() -> str:
    """Return the path of the program's file; "" for a prompt or notebook, and for odd paths."""
    path = getattr(sys.modules.get("__main__"), "__file__", None)
    try:
        path = os.path.abspath(path) if isinstance(path, str) else ""
        path.encode()
    except (OSError, ValueError):  # the working directory is gone; a name that is no text
        return ""
    return path if len(path) <= _PATH_LENGTH_MAX else ""


def _gpu_uuid(device: torch.device) -> str:
    if device.type != "cuda":
        return ""
    return str(getattr(torch.cuda.get_device_properties(device), "uuid", ""))
