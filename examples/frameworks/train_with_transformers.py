"""Transformers' Trainer: `torchrun --nproc-per-node=2 train_with_transformers.py`.

`report_to="mp_agent"` attaches mp_agent. With `MP_AGENT_ATTACH=1` neither it nor the import of the
integration is needed.
"""

import sys
import tempfile
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import mp_agent.integrations.transformers  # noqa: F401

STEPS, TOKENS = 4, 32


def main(directory: str) -> None:
    """Train a small GPT-2; the trainer prints its log."""
    torch.manual_seed(0)
    texts = [torch.randint(0, TOKENS, (8,)) for _ in range(64)]
    sizes: dict[str, Any] = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 8}
    trainer = Trainer(
        model=GPT2LMHeadModel(GPT2Config(vocab_size=TOKENS, **sizes)),
        args=TrainingArguments(
            output_dir=directory,
            max_steps=STEPS,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            logging_steps=1,
            report_to="mp_agent",
            use_cpu=True,
            disable_tqdm=True,
            save_strategy="no",
        ),
        train_dataset=[{"input_ids": text, "labels": text} for text in texts],
    )
    trainer.train()
    if trainer.is_world_process_zero():
        trainer.save_state()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp())
