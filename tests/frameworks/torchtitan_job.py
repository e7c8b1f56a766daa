"""`torchrun -m tests.frameworks.torchtitan_job DIRECTORY VARIANT …`: torchtitan's trainer on CPUs.

The model is its Llama 3 for debugging; tokenizer and texts are made here. What the trainer logs of
each step is written next to the ring.
"""

import contextlib
import json
import random
import sys
import zlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch._utils
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import schedules

import mp_agent
from tests.frameworks.torchtitan_variants import LAYERS, VARIANTS, WATCHING, Variant
from tests.gloo import end_process_group

_PROPERTIES = SimpleNamespace(total_memory=2**30, name="host")
_NAMES: dict[str, Any] = {
    "current_device": lambda: 0,
    "empty_cache": lambda: None,
    "get_device_name": lambda *args: "host",
    "get_device_properties": lambda *args: _PROPERTIES,
    "memory_stats": lambda *args: {},
    "reset_peak_memory_stats": lambda *args: None,
}
"""What torchtitan asks of a device, and `torch.cpu` lacks."""


def make_assets(directory: Path) -> None:
    """Write a tokenizer of words, and texts of these, without a network."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = [f"w{index}" for index in range(2000)]
    vocabulary = {word: index for index, word in enumerate(["<unk>", "<s>", "</s>", *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    (directory / "tokenizer").mkdir()
    tokenizer.save(str(directory / "tokenizer" / "tokenizer.json"))
    (directory / "tokenizer" / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": "<s>", "eos_token": "</s>"})
    )
    drawn = random.Random(0)
    (directory / "texts").mkdir()
    with (directory / "texts" / "texts.jsonl").open("w") as texts:
        for _ in range(400):
            text = " ".join(drawn.choices(words[:200], k=drawn.randint(20, 90)))
            texts.write(json.dumps({"text": text}) + "\n")


def _step_of_micro_batches(schedule: Any, **given: Any) -> None:
    """Run a schedule on batches that are split already, as later versions of torch do."""
    stages = schedule._stages if hasattr(schedule, "_stages") else [schedule._stage]
    for stage in stages:
        stage.has_backward = schedule._has_backward
        stage.clear_runtime_states()
    schedule._step_microbatches(**given)


@contextlib.contextmanager
def _on_host() -> Any:
    """Have torchtitan find the host as its device; give it what it asks of a later torch."""
    found = patch.object(torch._utils, "_get_available_device_type", lambda: "cpu")
    single = patch.object(schedules.PipelineScheduleSingle, "step", _step_of_micro_batches)
    looped = patch.object(schedules.PipelineScheduleMulti, "step", _step_of_micro_batches)
    timeout = patch.object(dist, "set_timeout", lambda *args: None, create=True)
    with patch.multiple(torch.cpu, create=True, **_NAMES), found, single, looped, timeout:
        yield


def build(variant: Variant, assets: Path, out: Path) -> Any:
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.llama3.config_registry import llama3_debugmodel

    config = llama3_debugmodel()
    config.model_spec.model.layers = config.model_spec.model.layers[:LAYERS]
    for layer in config.model_spec.model.layers:  # flex attention has no backward on a CPU
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    config.hf_assets_path, config.dump_folder = str(assets / "tokenizer"), str(out)
    config.dataloader.dataset_path = str(assets / "texts")
    training, parallelism = config.training, config.parallelism
    training.local_batch_size, training.seq_len = 4, 64
    training.global_batch_size = variant.global_batch_size
    training.steps, training.disable_cuda_graphs = variant.steps, True
    training.mixed_precision_param = variant.precision
    training.max_norm = 0.5
    parallelism.data_parallel_replicate_degree = variant.replicate
    parallelism.data_parallel_shard_degree = variant.shard
    parallelism.tensor_parallel_degree = variant.tp
    parallelism.pipeline_parallel_degree = variant.pp
    parallelism.pipeline_parallel_schedule = variant.schedule
    parallelism.spmd_backend = "partial_dtensor"
    config.compile.enable = variant.compiles
    config.compile.backend = "aot_eager"
    config.checkpoint.enable = config.validator.enable = False
    config.debug.seed = 7
    trainer = config.build()
    for part in trainer.model_parts:
        for module in part.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)  # gloo has no other
    return trainer


def record_log(trainer: Any) -> list[dict[str, Any]]:
    """What the trainer logs from now on, and this rank's clipped gradients as a sum of squares."""
    lines: list[dict[str, Any]] = []
    squares: list[float] = []
    log, step_optimizers = trainer.metrics_processor.log, trainer.optimizers.step

    def stepped(*args: Any, **kwargs: Any) -> None:
        gradients = (p.grad for part in trainer.model_parts for p in part.parameters())
        squares.append(sum(float(local(each).double().square().sum()) for each in gradients))
        step_optimizers(*args, **kwargs)

    def recorded(step: int, loss: float, loss_max: float, norm: float, **rest: Any) -> None:
        tokens = rest["extra_metrics"]["n_tokens_seen"]
        line = {"step": step, "loss": loss, "norm": norm, "tokens": tokens}
        lines.append(line | {"clipped_squares": squares[-1]})
        log(step, loss, loss_max, norm, **rest)

    trainer.metrics_processor.log, trainer.optimizers.step = recorded, stepped
    return lines


def local(tensor: Any) -> torch.Tensor:
    held: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return held.detach().float().contiguous()


def train(variant: Variant, directory: Path, out: Path, watching: str) -> None:
    """Train, and write what the trainer logged on this rank, its weights and its layers."""
    trainer = build(variant, directory, out)
    settings: dict[str, Any] = {"run": watching, "dir": out, "node_agent": "none"}
    if watching == "watch":
        from mp_agent.integrations.torchtitan import watch

        watch(trainer, layer_interval=1, **settings)
    elif watching == "init":
        mp_agent.init(layer_interval=1, **settings)
    lines = record_log(trainer)
    trainer.train()
    trainer.close()
    mp_agent.shutdown()
    weights, layers = 0, {}
    for part in trainer.model_parts:
        for name, parameter in part.named_parameters():
            weights = zlib.crc32(local(parameter).numpy().tobytes(), weights)
            layers[name] = parameter.numel()
    seen = {"lines": lines, "weights": weights, "layers": layers}
    (out / f"seen-{watching}-{dist.get_rank()}.json").write_text(json.dumps(seen))


def main(directory: Path, names: list[str]) -> None:
    torch.set_num_threads(1)
    with _on_host(), patch("time.sleep"):  # of rank 0 at the end of a training
        for name in names:
            out = directory / name
            out.mkdir(exist_ok=True)
            for watching in WATCHING:
                train(VARIANTS[name], directory, out, watching)
                dist.barrier()
    end_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
