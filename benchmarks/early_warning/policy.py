"""A policy that is trained by policy gradients, with a sampler that has a copy of its weights."""

from copy import deepcopy

import torch
from torch import nn

import mp_agent
from benchmarks.early_warning.tasks import Losses, OfStep, unchanged

BATCH = 256
_ACTIONS = 16
_INPUTS = 32
_RIGHT, _OTHER = 0.9, 0.1
"""Expected reward of the right action, and of any other."""


def _network(hidden: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(_INPUTS, hidden),
        nn.ReLU(),
        nn.Linear(hidden, hidden),
        nn.ReLU(),
        nn.Linear(hidden, _ACTIONS),
    )


_HIDDEN = (1024, 1088)


class PolicyTask:
    """Draws actions by a sampler in BF16, and learns from their reward.

    synchronized: of a step, whether (1) or not (0) the sampler gets the trainer's weights before
    it. entropy_bonus: what keeps the policy from deciding too early.
    """

    def __init__(
        self,
        seed: int,
        *,
        synchronized: OfStep = unchanged,
        entropy_bonus: float = 0.01,
        advantage_gain: float = 1.0,
    ) -> None:
        self.model = _network(_HIDDEN[seed % len(_HIDDEN)])
        self._sampler = deepcopy(self.model).bfloat16()
        self._generator = torch.Generator().manual_seed(seed)
        self._rule_IA = torch.randn(_INPUTS, _ACTIONS, generator=self._generator)
        self._synchronized, self._entropy_bonus = synchronized, entropy_bonus
        self._advantage_gain = advantage_gain

    def losses(self, step: int) -> Losses:
        """Draw actions for new states, and return the loss of their advantages."""
        if self._synchronized(step):
            self._sampler.load_state_dict(self.model.state_dict())
        states_BI = torch.randn(BATCH, _INPUTS, generator=self._generator)
        right_B = (states_BI @ self._rule_IA).argmax(dim=-1)
        with torch.no_grad():
            drawing_BA = self._sampler(states_BI.bfloat16()).float().log_softmax(dim=-1)
        action_B = torch.multinomial(drawing_BA.exp(), 1, generator=self._generator)[:, 0]
        chance_B = torch.where(action_B == right_B, _RIGHT, _OTHER)
        reward_B = (torch.rand(BATCH, generator=self._generator) < chance_B).float()

        own_BA = self.model(states_BI).log_softmax(dim=-1)
        own_B = own_BA.gather(-1, action_B[:, None])[:, 0]
        drawn_B = drawing_BA.gather(-1, action_B[:, None])[:, 0]
        mp_agent.observe_logprobs(own_B.detach(), drawn_B)
        advantage_B = self._advantage_gain * (reward_B - reward_B.mean())
        entropy = -(own_BA.exp() * own_BA).sum(dim=-1).mean()
        trained = -(advantage_B * own_B).mean() - self._entropy_bonus * entropy
        right_share = own_BA.detach().exp().gather(-1, right_B[:, None]).mean()
        return Losses(trained=trained, course=1.0 - _OTHER - (_RIGHT - _OTHER) * right_share)
