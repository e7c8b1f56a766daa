"""Expected speed and memory: estimates from counts, before anything is measured."""

from collections.abc import Collection, Sequence

from mp_agent.advice.environment import Hardware
from mp_agent.advice.plan import AUTOCAST
from mp_agent.advice.report.model import MatrixProduct, OddModule, SpeedEstimate, TrainingMemory

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


def is_within(name: str, modules: Collection[str]) -> bool:
    """Return whether a module is one of `modules` or inside of one."""
    parts = name.split(".")
    return any(".".join(parts[:end]) in modules for end in range(1, len(parts) + 1))


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
