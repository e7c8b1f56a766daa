"""`torchrun -m tests.frameworks.megatron_job DIRECTORY VARIANT …`: trains them under a probe.

Of the variant `reference` it writes the gradients of each layer of one process in float64.
"""

import contextlib
import functools
import json
import os
import re
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

os.environ["TORCHDYNAMO_DISABLE"] = "1"  # Megatron compiles small functions, for a long time

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.agent.probe.watching import watched
from tests.frameworks.cuda_on_cpu import cuda_on_cpu
from tests.frameworks.megatron_variants import (
    CLIP,
    DTYPES,
    EXPERTS,
    LAYERS,
    LEFT_OUT,
    LENGTH,
    MISTAKES,
    POISONED_STEP,
    SEQUENCES,
    VARIANTS,
    VOCABULARY,
    Variant,
    tokens,
)
from tests.gloo import end_process_group

REFERENCE = "reference"


def core(name: str) -> Any:
    """A module of Megatron-Core; the first one is imported when the probe is attached already."""
    return import_module(f"megatron.core.{name}")


def parallel_state(variant: Variant) -> Any:
    """The process groups of a variant's layout, made again only where the last one had another."""
    chunked = variant.chunks if variant.chunks > 1 else None
    layout = {
        "tensor_model_parallel_size": variant.tp,
        "pipeline_model_parallel_size": variant.pp,
        "virtual_pipeline_model_parallel_size": chunked,
        "context_parallel_size": variant.cp,
        "expert_model_parallel_size": variant.ep,
        "num_distributed_optimizer_instances": variant.instances,
    }
    groups = core("parallel_state")
    if layout != _LAYOUT:  # dozens of groups, each with threads and connections of its own
        groups.destroy_model_parallel()
        groups.initialize_model_parallel(**layout)
        _LAYOUT.clear()
        _LAYOUT.update(layout)
    return groups


_LAYOUT: dict[str, int | None] = {}


class Trainer:
    """A model of Megatron's, its optimizer, and the loop around them."""

    def __init__(self, variant: Variant, dtype: torch.dtype) -> None:
        self.variant, self.groups = variant, parallel_state(variant)
        core("tensor_parallel.random").model_parallel_cuda_manual_seed(7)
        if variant.moe:
            # A name that Megatron 0.16 defines only together with Transformer Engine, and then asks
            # for.
            vars(core("transformer.moe.moe_utils")).setdefault("te_general_gemm", None)
        self.config = self._config(dtype)
        self.chunks = [self._chunk(stage) for stage in range(variant.chunks)]
        for chunk in self.chunks:
            if dtype is torch.float64:
                chunk.double()  # norms have a type of their own
            self._fill(chunk)

    def _config(self, dtype: torch.dtype) -> Any:
        variant = self.variant
        experts = {
            "num_moe_experts": EXPERTS,
            "moe_router_topk": 2,
            "moe_router_load_balancing_type": "none",
            "moe_token_dispatcher_type": "alltoall",
            "add_bias_linear": False,
        }
        return core("transformer.transformer_config").TransformerConfig(
            num_layers=LAYERS,
            hidden_size=32,
            num_attention_heads=4,
            use_cpu_initialization=True,
            params_dtype=dtype,
            pipeline_dtype=dtype,
            bf16=dtype is torch.bfloat16,
            fp16=dtype is torch.float16,
            attention_softmax_in_fp32=dtype is not torch.float64,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            masked_softmax_fusion=False,
            bias_dropout_fusion=False,
            gradient_accumulation_fusion=False,
            tensor_model_parallel_size=variant.tp,
            pipeline_model_parallel_size=variant.pp,
            virtual_pipeline_model_parallel_size=variant.chunks if variant.chunks > 1 else None,
            context_parallel_size=variant.cp,
            expert_model_parallel_size=variant.ep,
            calculate_per_token_loss=variant.per_token,
            deallocate_pipeline_outputs=variant.frees_outputs,
            batch_p2p_comm=False,  # gloo mixes up two messages of a batch between the same ranks
            **(experts if variant.moe else {}),
        )

    def _chunk(self, stage: int) -> Any:
        variant = self.variant
        vp_stage = stage if variant.chunks > 1 else None
        ends = {"ignore_virtual": False, "vp_stage": vp_stage}
        return core("models.gpt.gpt_model").GPTModel(
            config=self.config,
            transformer_layer_spec=core("models.gpt.gpt_layer_specs").get_gpt_layer_local_spec(
                num_experts=EXPERTS if variant.moe else None
            ),
            vocab_size=VOCABULARY,
            max_sequence_length=LENGTH,
            pre_process=self.groups.is_pipeline_first_stage(**ends),
            post_process=self.groups.is_pipeline_last_stage(**ends),
            share_embeddings_and_output_weights=variant.tied,
            vp_stage=vp_stage,
        )

    def names(self, chunk: Any) -> Iterator[tuple[str, Any]]:
        """The parameters of a chunk by their names in the whole model."""
        layers = chunk.decoder.layers
        expert = self.groups.get_expert_model_parallel_rank() * (EXPERTS // self.variant.ep)
        for name, parameter in chunk.named_parameters():
            whole = re.sub(
                r"layers\.(\d+)", lambda m: f"layers.{layers[int(m[1])].layer_number - 1}", name
            )
            yield (
                re.sub(r"experts\.(\d+)", lambda m: f"experts.{int(m[1]) + expert}", whole),
                parameter,
            )

    def _fill(self, chunk: Any) -> None:
        """Give each parameter the numbers that it has in every variant, or this rank's part."""
        for name, parameter in self.names(chunk):
            if self.variant.tied and name == "output_layer.weight":
                name = "embedding.word_embeddings.weight"
            shape, split = list(parameter.shape), getattr(parameter, "tensor_model_parallel", False)
            dimension = parameter.partition_dim if split else 0
            if split:
                shape[dimension] *= self.variant.tp
            seeded = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            whole = torch.randn(shape, generator=seeded, dtype=torch.float64)
            base = 1.0 if "norm" in name and name.endswith("weight") else 0.0
            filled = base + 0.1 * whole
            if split and self.variant.tp > 1:
                rank = self.groups.get_tensor_model_parallel_rank()
                filled = filled.chunk(self.variant.tp, dim=dimension)[rank]
            parameter.data.copy_(filled)

    def losses(self, chunk: Any, step: int, micro_batch: int) -> tuple[Tensor, Tensor]:
        """The outputs of a chunk, on the last one losses [B, S], and which of these count."""
        found, counted = tokens(step)
        first = 2 * (
            self.groups.get_data_parallel_rank() * self.variant.micro_batches + micro_batch
        )
        own, counted = found[first : first + 2], counted[first : first + 2]
        positions = torch.arange(LENGTH).expand(2, LENGTH)
        mask = torch.ones(1, 1, LENGTH, LENGTH).tril() < 0.5
        output = chunk(own[:, :-1], positions, mask, labels=own[:, 1:])
        place = step, self.groups.get_data_parallel_rank(), micro_batch
        if self.variant.poisoned and place == (POISONED_STEP, 1, 1):
            output = output * float("nan")
        return output, counted

    def wrap(self) -> None:
        """Add what trains: mixed precision, data parallelism and the optimizer."""
        variant, optimizer, distributed = self.variant, core("optimizer"), core("distributed")
        if variant.dtype != "fp32":
            half = core("transformer.module").Float16Module
            self.chunks = [half(self.config, chunk) for chunk in self.chunks]
        options = optimizer.OptimizerConfig(
            optimizer="sgd" if variant.sgd else "adam",
            lr=1e-3,
            bf16=variant.dtype == "bf16",
            fp16=variant.dtype == "fp16",
            params_dtype=DTYPES[variant.dtype],
            use_distributed_optimizer=variant.distributed,
            overlap_param_gather=variant.gathers_late,
            clip_grad=CLIP if variant.clips else 0.0,
            loss_scale=variant.constant_scale or None,
            initial_loss_scale=variant.scale,
            min_loss_scale=1.0,
            loss_scale_window=3,
            hysteresis=2 if variant.steps > 4 else 1,
        )
        if variant.bare:
            self.optimizer = self._bare_optimizer(optimizer.optimizer, options)
            return
        wrapping = distributed.DistributedDataParallelConfig(
            use_distributed_optimizer=variant.distributed,
            grad_reduce_in_fp32=variant.dtype != "fp32",
            overlap_grad_reduce=variant.overlap,
            overlap_param_gather=variant.gathers_late,
            num_distributed_optimizer_instances=variant.instances,
            bucket_size=2000 if variant.overlap else None,
        )
        self.chunks = [
            distributed.DistributedDataParallel(self.config, wrapping, chunk)
            for chunk in self.chunks
        ]
        if variant.dealt:
            self.optimizer = self._dealt_optimizer(optimizer, options)
        else:
            self.optimizer = optimizer.get_megatron_optimizer(options, self.chunks)
        if variant.filled:
            self.optimizer.chained_optimizers[0]._init_optimizer_states_with_dummy_values()
        self.config.grad_scale_func = self.optimizer.scale_loss
        self.config.finalize_model_grads_func = distributed.finalize_model_grads
        if variant.overlap:
            self.config.no_sync_func = self.chunks[0].no_sync

    def _bare_optimizer(self, classes: Any, options: Any) -> Any:
        stepped = torch.optim.Adam(self.chunks[0].parameters(), lr=1e-3)
        if self.variant.dtype == "fp32":
            made = classes.FP32Optimizer(stepped, options, None)
        else:
            made = classes.Float16OptimizerWithFloat16Params(stepped, options, None, None)
        made.grad_stats_parallel_group = self.groups.get_model_parallel_group()
        made.tp_group = self.groups.get_tensor_model_parallel_group()
        return made

    def _dealt_optimizer(self, package: Any, options: Any) -> Any:
        """Two optimizers, of matrices and of the rest, as Megatron makes them for Muon."""
        parameters = list(self.chunks[0].parameters())
        made = []
        options.bf16 = False
        for matrices, kind in ((True, "sgd"), (False, "adam")):
            options.optimizer = kind
            for parameter in parameters:
                parameter.requires_grad = (parameter.dim() == 2) is matrices
            made += package.get_megatron_optimizer(options, self.chunks).chained_optimizers
        for parameter in parameters:
            parameter.requires_grad = True
        options.bf16 = self.variant.dtype == "bf16"
        groups = core("process_groups_config").ProcessGroupCollection.use_mpu_process_groups()
        layer_wise = core("optimizer.layer_wise_optimizer").LayerWiseDistributedOptimizer
        return layer_wise(made, options, groups, [None] * len(made))

    def step(self, step: int) -> dict[str, Any]:
        """Make a step, and return what Megatron says of it."""
        for chunk in self.chunks:
            if not self.variant.bare:
                chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        loss = self._scheduled(step) if self.variant.schedule else self._looped(step)
        scale = float(self.optimizer.get_loss_scale())
        success, norm = self._stepped()
        return {"loss": loss, "scale": scale, "skipped": not success, "norm": norm}

    def _stepped(self) -> tuple[bool, float | None]:
        if not self.variant.by_parts:
            success, norm, _ = self.optimizer.step()
            return success, norm
        if self.optimizer.prepare_grads():
            return False, None
        norm = self.optimizer.get_grad_norm()
        return self.optimizer.step_with_ready_grads(), norm

    def _looped(self, step: int) -> float | None:
        losses = []
        for micro_batch in range(self.variant.micro_batches):
            last = micro_batch == self.variant.micro_batches - 1
            syncs = self.variant.overlap and not last
            with self.chunks[0].no_sync() if syncs else contextlib.nullcontext():
                output, _ = self.losses(self.chunks[0], step, micro_batch)
                loss = output.float().mean()
                own = loss / self.variant.micro_batches
                if self.variant.scales_by_hand:
                    (own * self.optimizer.get_loss_scale()).backward()
                else:
                    self.optimizer.scale_loss(own).backward()
                losses.append(loss.detach())
        if self.variant.bare:
            for parameter in self.chunks[0].parameters():
                dist.all_reduce(parameter.grad)
                parameter.grad /= self.variant.dp
        else:
            self.config.finalize_model_grads_func(self.chunks)
        return self._averaged(torch.stack(losses).mean())

    def _averaged(self, loss: Tensor) -> float:
        group = self.groups.get_data_parallel_group(with_context_parallel=True)
        dist.all_reduce(loss, group=group)
        return float(loss) / dist.get_world_size(group)

    def _scheduled(self, step: int) -> float | None:
        """Train as Megatron-LM's training loop does, and return the loss that it logs."""
        counts = [iter(range(self.variant.micro_batches)) for _ in self.chunks]
        reduced = core("pipeline_parallel").get_forward_backward_func()(
            forward_step_func=functools.partial(self._forward, step),
            data_iterator=counts,
            model=self.chunks,
            num_microbatches=self.variant.micro_batches,
            seq_length=LENGTH,
            micro_batch_size=2,
            forward_only=False,
        )
        if not reduced:
            return None
        if self.variant.per_token:
            total = torch.stack(reduced).sum(0)
            dist.all_reduce(total, group=self.groups.get_data_parallel_group())
            return float(total[0] / total[1])
        return self._averaged(torch.stack(reduced).mean())

    def _forward(
        self, step: int, counts: Iterator[int], chunk: Any
    ) -> tuple[Tensor, Callable[[Tensor], object]]:
        output, counted = self.losses(chunk, step, next(counts))

        def per_token(losses: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            total, number = (losses.float() * counted).sum(), counted.sum()
            return total, number.int(), torch.stack([total.detach(), number])

        def mean(losses: Tensor) -> tuple[Tensor, Tensor]:
            loss = losses.float().mean()
            return loss, loss.detach().clone()

        return output, per_token if self.variant.per_token else mean


def train_wrongly(name: str, watch: Callable[[], Any]) -> None:
    """Train with a mistake that Megatron itself does not notice."""
    variant = MISTAKES[name]
    trainer = Trainer(variant, DTYPES[variant.dtype])
    with watch():
        if (mistake := IN_THE_LOOP.get(name)) is not None:
            trainer.wrap()
            mistake(trainer)
        else:
            package, made = core("optimizer"), core("optimizer").get_megatron_optimizer
            package.get_megatron_optimizer = functools.partial(without_a_layer, made)
            trainer.wrap()
            package.get_megatron_optimizer = made
        for step in range(1, variant.steps + 1):
            trainer.step(step)


def reduce_nothing(trainer: Any) -> None:
    trainer.config.finalize_model_grads_func = lambda chunks: None


def step_twice(trainer: Any) -> None:
    once = trainer._stepped
    trainer._stepped = lambda: (once(), once())[1]


def never_clear(trainer: Any) -> None:
    trainer.chunks[0].zero_grad_buffer = lambda: None


def clear_before_each_loss(trainer: Any) -> None:
    losses = trainer.losses

    def after_clearing(chunk: Any, *batch: int) -> Any:
        chunk.zero_grad_buffer()
        return losses(chunk, *batch)

    trainer.losses = after_clearing


IN_THE_LOOP: dict[str, Callable[[Any], None]] = {
    "nothing reduces slices": reduce_nothing,
    "steps twice": step_twice,
    "steps slices twice": step_twice,
    "never clears": never_clear,
    "never clears slices": never_clear,
    "clears between micro-batches": clear_before_each_loss,
}


def without_a_layer(made: Callable[..., Any], options: Any, chunks: list[Any]) -> Any:
    """Make an optimizer while a layer seems to be frozen, as of parameters listed by hand."""
    left_out = [p for name, p in chunks[0].named_parameters() if LEFT_OUT in name]
    for parameter in left_out:
        parameter.requires_grad = False
    optimizer = made(options, chunks)
    for parameter in left_out:
        parameter.requires_grad = True
    return optimizer


def train(variant: Variant, directory: Path, watch: Callable[[], Any]) -> None:
    trainer = Trainer(variant, DTYPES[variant.dtype])
    with contextlib.ExitStack() as stack:
        if not variant.late:
            stack.enter_context(watch())
        trainer.wrap()
        if variant.late:
            stack.enter_context(watch())
        seen = [trainer.step(step) for step in range(1, variant.steps + 1)]
    weights = nn.utils.parameters_to_vector(
        parameter for chunk in trainer.chunks for parameter in chunk.parameters()
    )
    found = {"steps": seen, "weights": zlib.crc32(weights.detach().float().numpy().tobytes())}
    (directory / f"seen{dist.get_rank()}.json").write_text(json.dumps(found))


def write_reference(directory: Path) -> None:
    """Write the gradients of step 1 in float64, of each model that the variants train."""
    for moe in (False, True):
        for tied in (False, True):
            for per_token in (False, True):
                variant = Variant(world=1, moe=moe, tied=tied, per_token=per_token)
                trainer = Trainer(variant, torch.float64)
                halves = gradients_of_halves(trainer)
                torch.save(halves, directory / f"{moe}-{tied}-{per_token}.pt")


def gradients_of_halves(trainer: Trainer) -> list[dict[str, Tensor]]:
    """The gradients of the mean loss of step 1 that the first and the second half add to it."""
    model, micro_batches = trainer.chunks[0], trainer.variant.micro_batches
    counts = tokens(1)[1] if trainer.variant.per_token else torch.ones(SEQUENCES, LENGTH)
    halves = []
    for half in (0, 1):
        model.zero_grad()
        for micro_batch in range(half * micro_batches // 2, (half + 1) * micro_batches // 2):
            output, counted = trainer.losses(model, 1, micro_batch)
            weight = counted if trainer.variant.per_token else 1.0
            ((output.double() * weight).sum() / counts.sum()).backward()
        halves.append({name: p.grad.clone() for name, p in trainer.names(model)})
    return halves


def main(directory: Path, names: list[str]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    with cuda_on_cpu():
        for name in names:
            place = directory / name
            place.mkdir(parents=True, exist_ok=True)
            begun = time.perf_counter()
            dist.barrier()
            if name == REFERENCE:
                write_reference(place)
            elif name in MISTAKES:
                train_wrongly(name, functools.partial(watched, place, rank, world))
            else:
                unwatched = place / "unwatched"
                unwatched.mkdir(exist_ok=True)
                variant = VARIANTS[name]
                watch = functools.partial(watched, place, rank, world, measure_local_gradients=True)
                train(variant, place, watch)
                train(variant, unwatched, contextlib.nullcontext)
            if rank == 0:
                print(f"{name}: {time.perf_counter() - begun:.2f} s", flush=True)
        dist.barrier()
    end_process_group()


if __name__ == "__main__":
    assert "megatron.core" not in sys.modules, "the first variant imports it after the probe"
    main(Path(sys.argv[1]), sys.argv[2:])
