"""Distinguish log-probabilities shifted by a token from those of a less precise sampler."""

import torch

logits = torch.randn(2, 16, 64, generator=torch.Generator().manual_seed(0))
tokens = torch.multinomial(logits.softmax(-1).flatten(0, 1), 1).reshape(2, 16)


def logprobs_of(logits: torch.Tensor) -> torch.Tensor:
    """Return [B, T] of the tokens that were drawn."""
    return logits.float().log_softmax(-1).gather(-1, tokens[..., None])[..., 0]


def k3(trainer: torch.Tensor, sampler: torch.Tensor) -> float:
    """Return the estimate of KL(sampler || trainer)."""
    delta = (trainer - sampler).double()
    return float((delta.expm1() - delta).mean())


trainer = logprobs_of(logits)
rounded = logprobs_of(logits.bfloat16())  # a sampler that computes in BF16
shifted = trainer.roll(1, dims=1)  # a sampler whose first entry is of the prompt

for name, sampler in {"rounded": rounded, "shifted": shifted}.items():
    as_they_are = k3(trainer, sampler)
    moved_back = k3(trainer[:, :-1], sampler[:, 1:])
    print(f"{name}: k3 {as_they_are:.1e} as reported, {moved_back:.1e} one token further")
    if moved_back < as_they_are / 100:
        print("  shift the sampler's log-probabilities by one token")

assert k3(trainer, rounded) < 1e-3 < 1e-1 < k3(trainer, shifted)
assert k3(trainer[:, :-1], shifted[:, 1:]) == 0.0
