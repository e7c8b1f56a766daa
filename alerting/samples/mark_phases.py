"""Say when the job does something other than training: then a pause is not a stall."""

import mp_agent


def evaluate() -> float:
    """Stand for your own."""
    return 0.5


def save_checkpoint() -> None:
    """Stand for your own."""


for step in range(1, 4):
    ...  # forward, backward, optimizer
    if step % 2 == 0:
        with mp_agent.phase("eval"):
            evaluate()
        with mp_agent.phase("checkpoint"):
            save_checkpoint()
