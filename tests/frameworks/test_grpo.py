"""GRPOTrainer of TRL reports log-probabilities of its completions, as the documents show."""

from pathlib import Path
from typing import Any

import pytest
import torch

from mp_agent.catalog.metrics.reinforcement import correlation, k3
from mp_agent.probe.probe import Probe
from mp_agent.records.columns import LOGPROBS, by_name
from mp_agent.ring.writer import RingWriter
from mp_agent.settings import Settings
from tests.agent.probe.rings import make_identity, read_ring

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # of the libraries, about each other
]

WORDS = ("<pad>", "<eos>", *(f"w{number}" for number in range(30)))


def make_tokenizer() -> Any:
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    model = tokenizers.models.WordLevel({word: place for place, word in enumerate(WORDS)}, "w0")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="w0"
    )


def test_the_tokens_of_every_completion_are_compared(tmp_path: Path) -> None:
    trl = pytest.importorskip("trl")
    datasets = pytest.importorskip("datasets")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            n_layer=1,
            n_head=2,
            n_embd=16,
            vocab_size=len(WORDS),
            n_positions=32,
            bos_token_id=1,
            eos_token_id=1,
        )
    )
    writer = RingWriter.create(tmp_path / "ring", make_identity())
    probe = Probe(lambda: writer, Settings())
    tokens: list[int] = []

    class WatchedGRPOTrainer(trl.GRPOTrainer):  # type: ignore[name-defined]
        def _generate_and_score_completions(self, inputs: Any) -> Any:
            batch = super()._generate_and_score_completions(inputs)
            trainer = batch["old_per_token_logps"]
            sampler = trainer.bfloat16()  # stands for the rollout engine, which needs a GPU
            probe.observe_logprobs(trainer, sampler, batch["completion_mask"])
            tokens.append(int(batch["completion_mask"].sum()))
            return batch

    trainer = WatchedGRPOTrainer(
        model=model,
        reward_funcs=lambda completions, **_: [float(len(each)) for each in completions],
        args=trl.GRPOConfig(
            output_dir=str(tmp_path / "out"),
            per_device_train_batch_size=4,
            num_generations=4,
            num_iterations=2,
            max_completion_length=6,
            max_steps=4,
            use_cpu=True,
            bf16=False,
            report_to=[],
            save_strategy="no",
        ),
        train_dataset=datasets.Dataset.from_list([{"prompt": "w1 w2 w3"}] * 16),
        processing_class=make_tokenizer(),
    )
    probe.attach()
    try:
        trainer.train()
        probe.flush()
    finally:
        probe.detach()
        writer.close()

    contents = read_ring(tmp_path / "ring")
    share = [share.family for share in contents.schema.shares].index(LOGPROBS.name)
    rows = [
        by_name(LOGPROBS.names, record.families[LOGPROBS.name][share].tolist())
        for record in contents.records
        if LOGPROBS.name in record.families
    ]
    assert len(contents.records) == 4
    assert [row["tokens"] for row in rows] == tokens
    for row in rows:
        divergence, correlated = k3(row), correlation(row)
        assert divergence is not None
        assert correlated is not None
        assert 0.0 < divergence < 1e-3
        assert correlated > 0.99
