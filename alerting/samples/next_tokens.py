"""Give a language model the next tokens as targets, unseen, and none of the padding."""

import torch
from torch import Tensor
from torch.nn import functional

IGNORED = -100


def next_token_loss(logits_BTV: Tensor, tokens_BT: Tensor, attention_mask_BT: Tensor) -> Tensor:
    """Return the mean cross-entropy of the tokens that follow, without those of padding."""
    targets_BT = tokens_BT.masked_fill(attention_mask_BT == 0, IGNORED)
    return functional.cross_entropy(
        logits_BTV[:, :-1].flatten(0, 1), targets_BT[:, 1:].flatten(), ignore_index=IGNORED
    )


def causal_attention(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Return what each position attends to, of itself and of those before it [B, H, T, D]."""
    return functional.scaled_dot_product_attention(queries, keys, values, is_causal=True)


if __name__ == "__main__":
    tokens_BT = torch.tensor([[5, 3, 8, 0, 0], [2, 7, 1, 4, 6]])
    mask_BT = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
    logits_BTV = torch.zeros(2, 5, 10)
    logits_BTV[0, 2:] = 100.0 * torch.arange(10)  # of padding, at which nothing is to be learned
    loss = next_token_loss(logits_BTV, tokens_BT, mask_BT)
    assert torch.isclose(loss, torch.tensor(10.0).log())
    print(f"cross-entropy of six targets: {loss:.3f}")
    states = torch.randn(2, 1, 5, 4)
    changed = torch.cat([states[:, :, :-1], torch.zeros(2, 1, 1, 4)], dim=2)
    before, after = (causal_attention(each, each, each)[:, :, :-1] for each in (states, changed))
    assert torch.equal(before, after)
