"""`torchrun -m tests.frameworks.deepspeed_job DIRECTORY [VARIANT …]`: trains them under a probe."""

import gc
import json
import os
import sys
import time
import weakref
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

os.environ["DS_ACCELERATOR"] = "cpu"
os.environ["TORCHDYNAMO_DISABLE"] = "1"  # DeepSpeed compiles Muon, for minutes

import torch
import torch.distributed as dist

from mp_agent.records.columns import BATCH_INTERVAL_STEPS
from mp_agent.records.steps import UNUSED_GRADIENTS_AT_MOST
from tests.agent.probe.watching import watched
from tests.frameworks.deepspeed_variants import (
    CLIP,
    DTYPES,
    MICRO_BATCHES,
    POISONED_STEP,
    RESUMED_STEPS,
    STEPS,
    VARIANTS,
    Variant,
    batch,
    import_deepspeed,
    make_model,
)
from tests.gloo import end_process_group

ONE_BATCH_STAGES = (2, 3)
LEFT_OUT_STAGES = (0, 1, 2, 3)
BYPASSED_STAGES = (0, 2)
UNSTEPPED_STAGES = (0, 2, 3)
LEFT_OUT_STEPS = 12
"""Until the second look at parameters that no optimizer holds."""


def config_of(variant: Variant) -> dict[str, object]:
    config: dict[str, object] = {
        "train_micro_batch_size_per_gpu": 5,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "gradient_clipping": CLIP if variant.clips else 0.0,
        "zero_optimization": {
            "stage": variant.stage,
            "round_robin_gradients": variant.round_robin,
            "stage3_param_persistence_threshold": 0,
            **({"offload_optimizer": {"device": "cpu"}} if variant.offload else {}),
        },
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": variant.dtype == "bf16"},
        "fp16": {
            "enabled": variant.dtype == "fp16",
            "initial_scale_power": 8,
            "hysteresis": 1,
            "loss_scale_window": 2,
        },
    }
    if variant.accumulate:
        config["data_types"] = {"grad_accum_dtype": variant.accumulate}
    if variant.muon:
        # With torch's own Adam next to it: that of DeepSpeed is compiled first.
        config["optimizer"] = {"type": "Muon", "params": {"lr": 1e-3, "torch_adam": True}}
    return config


def parameter_groups(model: torch.nn.Module) -> Iterator[dict[str, object]]:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    yield {"params": [each for each in trained if each.ndim > 1]}
    yield {"params": [each for each in trained if each.ndim == 1], "weight_decay": 0.0}


def make_engine(variant: Variant) -> Any:
    deepspeed = import_deepspeed()
    # DeepSpeed refuses FP16 on processors without its instructions; torch computes it on all.
    deepspeed.accelerator.get_accelerator().is_fp16_supported = lambda: True
    model = make_model()
    marked: Any
    for marked in model.parameters():
        marked.use_muon = marked.ndim > 1
    optimizer = None if variant.muon else torch.optim.Adam(list(parameter_groups(model)), lr=1e-3)
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=optimizer,
        model_parameters=[each for each in model.parameters() if each.requires_grad],
        config=config_of(variant),
    )
    return engine


def train(variant: Variant, engine: Any, steps: int, directory: Path | None = None) -> None:
    """Train; write what DeepSpeed says of each step into `directory`, and the weights before it."""
    rank = dist.get_rank()
    seen: list[dict[str, object]] = []
    for step in range(1, steps + 1):
        weights = weights_of(engine)
        scale = float(getattr(engine.optimizer, "loss_scale", 1.0))
        for micro_batch in range(MICRO_BATCHES):
            inputs = batch(step, rank, micro_batch)
            if variant.poisoned and (step, rank, micro_batch) == (POISONED_STEP, 1, 0):
                inputs = inputs * float("inf")
            loss = engine(inputs.to(DTYPES[variant.dtype]))
            if variant.own_backward:
                (engine.scale(loss) if variant.dtype == "fp16" else loss).backward()
            else:
                engine.backward(loss)
            engine.step()
        norm = engine.get_global_grad_norm()
        seen.append(
            {
                "norm": None if norm is None else float(norm),
                "skipped": bool(getattr(engine.optimizer, "overflow", False)),
                "scale": scale,
                "step": engine.global_steps,
            }
        )
        if directory is not None and rank == 0:
            torch.save(weights, directory / f"weights{step}.pt")
    if directory is not None and rank == 0:
        (directory / "seen.json").write_text(json.dumps(seen))


def train_on_one_batch(directory: Path, stage: int) -> None:
    """Train all ranks on the same batch, until after the first look at batches.

    Writes the largest outputs of the last layer, of each micro-batch.
    """
    rank = dist.get_rank()
    largest: list[float] = []
    with watched(directory, rank, dist.get_world_size(), measure_activations=True):
        engine = make_engine(Variant(stage))
        engine.module.head.register_forward_hook(
            lambda module, inputs, outputs: largest.append(float(outputs.abs().max()))
        )
        for _ in range(MICRO_BATCHES * (BATCH_INTERVAL_STEPS + 1)):
            engine.backward(engine(batch(1, 0, 0)))
            engine.step()
        engine.destroy()
    (directory / f"largest{rank}.json").write_text(json.dumps(largest))


def train_without_the_head(directory: Path, stage: int) -> None:
    """Train a model whose last layer the optimizer does not get."""
    deepspeed, model = import_deepspeed(), make_model()
    held = list(model.get_submodule("body").parameters())
    with watched(directory, dist.get_rank(), dist.get_world_size()):
        engine, *_ = deepspeed.initialize(
            model=model,
            optimizer=torch.optim.Adam(held, lr=1e-3),
            model_parameters=held,
            config=config_of(Variant(stage)),
        )
        for step in range(1, LEFT_OUT_STEPS + 1):
            for micro_batch in range(MICRO_BATCHES):
                engine.backward(engine(batch(step, dist.get_rank(), micro_batch)))
                engine.step()
        engine.destroy()


def train_without_the_engine(directory: Path, stage: int) -> None:
    """Step the engine's optimizer in place of the engine."""
    with watched(directory, dist.get_rank(), dist.get_world_size()):
        engine = make_engine(Variant(stage))
        engine.set_gradient_accumulation_boundary(True)
        for step in (1, 2):
            engine.backward(engine(batch(step, dist.get_rank(), 0)))
            engine.optimizer.step()
        engine.destroy()


def train_without_steps(directory: Path, stage: int) -> None:
    """Run the backwards of many steps, and never step."""
    with watched(directory, dist.get_rank(), dist.get_world_size()):
        engine = make_engine(Variant(stage))
        for index in range(MICRO_BATCHES * UNUSED_GRADIENTS_AT_MOST):
            engine.backward(engine(batch(index, dist.get_rank(), 0)))
        engine.destroy()


def weights_of(engine: Any) -> dict[str, torch.Tensor]:
    """The weights that the model computes with, in double precision; gathered under ZeRO 3."""
    deepspeed = import_deepspeed()
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        return {name: p.detach().double() for name, p in engine.module.named_parameters()}


def run(variant: Variant, directory: Path) -> None:
    checkpoint = directory / "checkpoint"
    if variant.resumed:
        before = make_engine(variant)
        train(variant, before, RESUMED_STEPS)
        before.save_checkpoint(str(checkpoint))
        before.destroy()
        del before
        gc.collect()
    with ExitStack() as watch:
        if not variant.watched_late:
            watch.enter_context(watched(directory, dist.get_rank(), dist.get_world_size()))
        engine = make_engine(variant)
        if variant.watched_late:
            watch.enter_context(watched(directory, dist.get_rank(), dist.get_world_size()))
        if variant.resumed:
            engine.load_checkpoint(str(checkpoint))
        train(variant, engine, STEPS, directory)
        optimizer = weakref.ref(engine.optimizer)
        engine.destroy()
        del engine
        gc.collect()
        (directory / f"freed{dist.get_rank()}").write_text(str(optimizer() is None))


def main(directory: Path, names: list[str]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for variant in [VARIANTS[name] for name in names or VARIANTS]:
        place = directory / variant.name
        place.mkdir(parents=True, exist_ok=True)
        begun = time.perf_counter()
        dist.barrier()
        run(variant, place)
        if dist.get_rank() == 0:
            print(f"{variant.name}: {time.perf_counter() - begun:.2f} s", flush=True)
    dist.barrier()
    for stage in LEFT_OUT_STAGES:
        place = directory / f"left out {stage}"
        place.mkdir(exist_ok=True)
        train_without_the_head(place, stage)
    dist.barrier()
    for stage in BYPASSED_STAGES:
        place = directory / f"bypassed {stage}"
        place.mkdir(exist_ok=True)
        train_without_the_engine(place, stage)
    dist.barrier()
    for stage in UNSTEPPED_STAGES:
        place = directory / f"never stepped {stage}"
        place.mkdir(exist_ok=True)
        train_without_steps(place, stage)
    dist.barrier()
    for stage in ONE_BATCH_STAGES:
        place = directory / f"one batch {stage}"
        place.mkdir(exist_ok=True)
        train_on_one_batch(place, stage)
    dist.barrier()
    end_process_group()


if __name__ == "__main__":
    assert "deepspeed" not in sys.modules, "the first variant imports it after the probe attached"
    main(Path(sys.argv[1]), sys.argv[2:])
