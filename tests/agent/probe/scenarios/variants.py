"""The ways of training that the probe must measure rightly."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Variant:
    name: str
    autocast: str = ""
    """Name of the autocast dtype; "" trains in fp32."""
    scale: float = 0.0
    """Initial loss scale; 0 trains without GradScaler."""
    explicit_unscale: bool = False
    optimizer: str = "AdamW"
    fused: bool = False
    micro_batches: int = 1
    clip_norm: float = 0.0
    clip_value: float = 0.0
    steps: int = 4
    poison: str = ""
    """What goes wrong on the last rank at step 3: input_nan, input_inf, backward_nan."""


VARIANTS = {
    variant.name: variant
    for variant in (
        Variant("fp32"),
        Variant("fp32_sgd_fused", optimizer="SGD", fused=True),
        Variant("fp32_clip", clip_norm=0.05),
        Variant("fp32_clip_value", clip_value=1e-3),
        Variant("fp32_accumulation_clip", micro_batches=3, clip_norm=0.05),
        Variant("bf16", autocast="bfloat16"),
        Variant("bf16_fused_clip", autocast="bfloat16", fused=True, clip_norm=0.05),
        Variant("fp16", autocast="float16", scale=2.0**12),
        Variant("fp16_sgd", autocast="float16", scale=2.0**12, optimizer="SGD"),
        Variant(
            "fp16_unscale_clip",
            autocast="float16",
            scale=2.0**12,
            explicit_unscale=True,
            clip_norm=0.05,
        ),
        Variant("fp16_fused", autocast="float16", scale=2.0**12, fused=True),
        Variant(
            "fp16_fused_sgd",
            autocast="float16",
            scale=2.0**12,
            fused=True,
            optimizer="SGD",
            micro_batches=2,
        ),
        Variant(
            "fp16_fused_unscale_clip",
            autocast="float16",
            scale=2.0**12,
            fused=True,
            explicit_unscale=True,
            clip_norm=0.05,
        ),
        Variant("fp16_clip_while_scaled", autocast="float16", scale=2.0**12, clip_norm=0.05),
        Variant("fp16_accumulation", autocast="float16", scale=2.0**12, micro_batches=3),
        Variant("fp16_overflow", autocast="float16", scale=2.0**21, steps=6),
        Variant("fp16_overflow_fused", autocast="float16", scale=2.0**21, steps=6, fused=True),
        Variant("input_nan", poison="input_nan"),
        Variant("input_inf", poison="input_inf"),
        Variant("backward_nan", poison="backward_nan"),
        Variant("input_nan_fp16", autocast="float16", scale=2.0**12, poison="input_nan"),
    )
}

POISONED_STEP = 3


def variants_of(strategy: str) -> list[Variant]:
    """The variants that torch itself can train: fused SGD does not know DTensors."""
    return [
        variant
        for variant in VARIANTS.values()
        if not (strategy == "fsdp2" and variant.fused and variant.optimizer == "SGD")
    ]
