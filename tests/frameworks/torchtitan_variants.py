"""Layouts of torchtitan's trainer that are run on two CPUs."""

from dataclasses import dataclass

LAYERS = 3
WATCHING = ("none", "watch", "init")
"""Each variant is trained without a probe, with `watch`, and with a probe alone."""


@dataclass(frozen=True)
class Variant:
    """`global_batch_size`: -1 is one micro-batch a rank."""

    replicate: int = 1
    shard: int = 1
    tp: int = 1
    pp: int = 1
    schedule: str = "1F1B"
    precision: str = "float32"
    compiles: bool = False
    global_batch_size: int = -1
    steps: int = 5


VARIANTS = {
    "ddp": Variant(replicate=2),
    "fsdp": Variant(shard=2),
    "fsdp-accumulated": Variant(shard=2, global_batch_size=16),
    "fsdp-bf16": Variant(shard=2, precision="bfloat16"),
    "fsdp-compiled": Variant(shard=2, compiles=True),
    "tp": Variant(tp=2),
    "pp": Variant(pp=2),
    "pp-interleaved": Variant(pp=2, schedule="Interleaved1F1B"),
}
