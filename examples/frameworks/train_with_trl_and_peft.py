"""TRL's SFTTrainer with a LoRA of PEFT: `torchrun --nproc-per-node=2 train_with_trl_and_peft.py`.

Attached by `MP_AGENT_ATTACH=1`: there is nothing of mp_agent in the script.
"""

import sys
import tempfile
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

STEPS = 4
WORDS = ("<eos>", "one", "two", "three")


def make_tokenizer() -> Any:
    """Return a tokenizer of four words."""
    numbers = {word: number for number, word in enumerate(WORDS)}
    tokenizer = Tokenizer(models.WordLevel(numbers, unk_token="<eos>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<eos>", unk_token="<eos>"
    )


def main(directory: str) -> None:
    """Train the adapters of a small GPT-2; the trainer prints its log."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 16}
    trainer = SFTTrainer(
        model=GPT2LMHeadModel(
            GPT2Config(vocab_size=len(WORDS), bos_token_id=0, eos_token_id=0, **sizes)
        ),
        args=SFTConfig(
            output_dir=directory,
            max_steps=STEPS,
            max_length=8,
            per_device_train_batch_size=2,
            gradient_checkpointing=False,
            logging_steps=1,
            report_to="none",
            bf16=False,
            use_cpu=True,
            disable_tqdm=True,
            save_strategy="no",
        ),
        train_dataset=Dataset.from_dict({"text": ["one two three", "three two one two"] * 32}),
        processing_class=make_tokenizer(),
        peft_config=LoraConfig(r=2, target_modules=["c_attn"], task_type="CAUSAL_LM"),
    )
    trainer.train()
    if trainer.is_world_process_zero():
        trainer.save_state()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp())
