"""`torchrun -m tests.frameworks.deepspeed_trainer_job DIRECTORY`: transformers with DeepSpeed."""

import json
import os
import sys
from pathlib import Path

os.environ["DS_ACCELERATOR"] = "cpu"

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from tests.agent.probe.watching import watched
from tests.frameworks.deepspeed_variants import import_deepspeed
from tests.gloo import end_process_group

STEPS, MICRO_BATCHES, CLIP = 4, 2, 0.3


def main(directory: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for stage in (2, 3):
        place = directory / f"zero{stage}"
        place.mkdir(exist_ok=True)
        dist.barrier()
        with watched(place, dist.get_rank(), dist.get_world_size()):
            history = train(stage, place)
        if dist.get_rank() == 0:
            (place / "history.json").write_text(json.dumps(history))
    dist.barrier()
    end_process_group()


def train(stage: int, place: Path) -> list[dict[str, float]]:
    import_deepspeed()
    arguments = TrainingArguments(
        output_dir=str(place / "output"),
        per_device_train_batch_size=2,
        gradient_accumulation_steps=MICRO_BATCHES,
        max_steps=STEPS,
        max_grad_norm=CLIP,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        bf16=True,
        deepspeed={
            "train_micro_batch_size_per_gpu": "auto",
            "gradient_accumulation_steps": "auto",
            "gradient_clipping": "auto",
            "zero_optimization": {"stage": stage},
            "zero_allow_untested_optimizer": True,
            "bf16": {"enabled": True},
        },
    )
    torch.manual_seed(1)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            max_position_embeddings=32,
        )
    )
    data = torch.randint(0, 64, (64, 12), generator=torch.Generator().manual_seed(2))
    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=[{"input_ids": row, "labels": row} for row in data],
    )
    trainer.train()
    return [entry for entry in trainer.state.log_history if "grad_norm" in entry]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
