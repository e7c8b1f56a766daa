"""Ways of training a small GPT with Megatron-Core; all of one size are the same model and data."""

from dataclasses import asdict, dataclass

import torch

STEPS, CLIP, SEQUENCES, LENGTH, VOCABULARY, LAYERS, EXPERTS = 4, 0.5, 8, 16, 64, 4, 4
POISONED_STEP = 2


@dataclass(frozen=True)
class Variant:
    """One way of training.

    tp, pp, cp, ep: ranks among which tensors, layers, contexts or experts are split. chunks: parts
    of a stage in the interleaved schedule. distributed: the distributed optimizer. overlap: reduces
    gradients during backward. schedule: Megatron's own runs the micro-batches, else a loop does.
    per_token: the loss is one per token, of which each sequence has another number. dealt: the
    layer-wise optimizer. bare: no wrapper of Megatron's. instances: groups of ranks that hold the
    same slices. gathers_late: parameters during the next forward. by_parts: the loop prepares
    gradients, clips and steps by itself. filled: the optimizer's state is made first.
    scales_by_hand: the loop multiplies the loss by the scale. poisoned: one rank's data is once
    NaN. late: the probe attaches once the optimizer was made.
    """

    world: int = 2
    dtype: str = "fp32"
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    chunks: int = 1
    distributed: bool = False
    moe: bool = False
    tied: bool = True
    overlap: bool = False
    schedule: bool = False
    frees_outputs: bool = False
    per_token: bool = False
    dealt: bool = False
    bare: bool = False
    sgd: bool = False
    clips: bool = True
    instances: int = 1
    gathers_late: bool = False
    by_parts: bool = False
    filled: bool = False
    scales_by_hand: bool = False
    poisoned: bool = False
    late: bool = False
    scale: float = 2.0**10
    constant_scale: float = 0.0
    steps: int = STEPS

    @property
    def name(self) -> str:
        """All that is not as usual."""
        usual = asdict(Variant())
        changed = [
            key
            if value is True
            else f"{key}={value:g}"
            if isinstance(value, float)
            else f"{key}={value}"
            for key, value in asdict(self).items()
            if value != usual[key]
        ]
        return ",".join(changed) or "plain"

    @property
    def dp(self) -> int:
        """Ranks that have different data."""
        return self.world // (self.tp * self.pp * self.cp)

    @property
    def layout(self) -> tuple[int, ...]:
        """What its process groups follow from."""
        return self.tp, self.pp, self.chunks, self.cp, self.ep, self.instances

    @property
    def micro_batches(self) -> int:
        """Of each rank; two sequences in each."""
        return SEQUENCES // (2 * self.dp)


def _of_two() -> list[Variant]:
    plain = [
        Variant(dtype=dtype, distributed=distributed)
        for dtype in ("fp32", "bf16", "fp16")
        for distributed in (False, True)
    ]
    return [
        *plain,
        Variant(clips=False),
        Variant(sgd=True),
        Variant(tied=False),
        Variant(dtype="bf16", late=True, distributed=True),
        Variant(schedule=True),
        Variant(schedule=True, per_token=True),
        Variant(dtype="fp16", schedule=True, per_token=True, distributed=True),
        Variant(overlap=True),
        Variant(dtype="bf16", overlap=True, distributed=True, schedule=True),
        Variant(dtype="fp16", scale=2.0**36, steps=30),
        Variant(dtype="fp16", constant_scale=512.0),
        Variant(dtype="bf16", constant_scale=512.0, distributed=True),
        Variant(dtype="bf16", poisoned=True),
        Variant(dtype="fp16", poisoned=True),
        Variant(dtype="fp16", poisoned=True, distributed=True),
        Variant(dtype="bf16", dealt=True),
        Variant(bare=True),
        Variant(dtype="bf16", bare=True),
        Variant(tp=2),
        Variant(dtype="fp16", tp=2, distributed=True),
        Variant(pp=2, schedule=True),
        Variant(dtype="fp16", pp=2, schedule=True, frees_outputs=True, per_token=True),
        Variant(dtype="bf16", pp=2, chunks=2, schedule=True, frees_outputs=True),
        Variant(dtype="bf16", distributed=True, gathers_late=True, overlap=True),
        Variant(dtype="fp16", by_parts=True, poisoned=True),
        Variant(dtype="bf16", distributed=True, filled=True),
        Variant(dtype="fp16", scales_by_hand=True),
        Variant(moe=True),
        Variant(moe=True, ep=2, distributed=True),
    ]


def _of_four() -> list[Variant]:
    return [
        Variant(world=4, dtype="bf16", tp=2, distributed=True),
        Variant(world=4, tp=2, dtype="fp16"),
        Variant(world=4, pp=2, distributed=True, schedule=True, frees_outputs=True),
        Variant(world=4, dtype="bf16", tp=2, pp=2, schedule=True),
        Variant(world=4, dtype="bf16", distributed=True, instances=2),
        Variant(world=4, moe=True, ep=2),
        Variant(world=4, dtype="bf16", moe=True, ep=2, distributed=True),
    ]


MISTAKE_STEPS = 12
"""Until the second look at parameters that no optimizer holds."""
LONG_MISTAKE_STEPS = 20
"""Until numbers of gradients that seem to add up are read."""
MISTAKES = {
    "a layer is left out": Variant(steps=MISTAKE_STEPS),
    "nothing reduces slices": Variant(dtype="bf16", distributed=True, steps=MISTAKE_STEPS),
    "steps twice": Variant(steps=MISTAKE_STEPS),
    "steps slices twice": Variant(dtype="bf16", distributed=True, steps=MISTAKE_STEPS),
    "never clears": Variant(steps=LONG_MISTAKE_STEPS),
    "never clears slices": Variant(dtype="bf16", distributed=True, steps=LONG_MISTAKE_STEPS),
    "clears between micro-batches": Variant(steps=MISTAKE_STEPS),
}
LEFT_OUT = "decoder.final_layernorm"

VARIANTS = {variant.name: variant for variant in (*_of_two(), *_of_four())}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def tokens(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """All sequences of a step [SEQUENCES, LENGTH + 1], and which of their losses count."""
    data = torch.Generator().manual_seed(step)
    found = torch.randint(0, VOCABULARY, (SEQUENCES, LENGTH + 1), generator=data)
    counted = torch.arange(LENGTH)[None] < torch.arange(4, 4 + SEQUENCES)[:, None]
    return found, counted.float()
