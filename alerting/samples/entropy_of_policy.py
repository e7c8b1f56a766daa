"""See how fast a policy becomes certain, and how an entropy bonus or smaller advantages keep it."""

import torch


def entropy_after(steps: int, *, advantage_gain: float = 1.0, bonus: float = 0.0) -> float:
    """Return what a choice among 16 actions, one of which is better, has left, in nats."""
    generator = torch.Generator().manual_seed(0)
    logits_A = torch.zeros(16, requires_grad=True)
    optimizer = torch.optim.SGD([logits_A], lr=0.5)
    for _ in range(steps):
        logp_A = logits_A.log_softmax(-1)
        drawn_B = torch.multinomial(logp_A.detach().exp(), 64, True, generator=generator)
        reward_B = (drawn_B == 3).float()
        advantage_B = advantage_gain * (reward_B - reward_B.mean())
        entropy = -(logp_A.exp() * logp_A).sum()
        optimizer.zero_grad()
        loss: torch.Tensor = -(advantage_B * logp_A[drawn_B]).mean() - bonus * entropy
        torch.autograd.backward(loss)
        optimizer.step()
    logp_A = logits_A.detach().log_softmax(-1)
    return float(-(logp_A.exp() * logp_A).sum())


plain = entropy_after(100)
large = entropy_after(100, advantage_gain=10.0)
kept = entropy_after(100, advantage_gain=10.0, bonus=4.0)
print(f"of 2.77 nats: {plain:.2f}; advantages ten times as large: {large:.2f}; bonus: {kept:.2f}")

assert large < plain < 2.77
assert kept > 2 * large
