"""accelerate: `accelerate launch --cpu --num_processes 2 train_with_accelerate.py`.

The tracker is one of `log_with`, as W&B and TensorBoard are. With `MP_AGENT_ATTACH=1` it is not
needed; the loop is then numbered by the optimizer's state.
"""

import json
import time

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader

from mp_agent.integrations.accelerate import MpAgentTracker

STEPS, MICRO_BATCHES = 4, 2


def main() -> None:
    """Train; the main process prints what is logged."""
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=MICRO_BATCHES,
        log_with=[MpAgentTracker(logs_steps=True)],
    )
    accelerator.init_trackers("example")
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    rows = list(torch.randn(STEPS * MICRO_BATCHES * 4, 4))
    data: DataLoader[torch.Tensor] = DataLoader(rows, batch_size=2)  # type: ignore[arg-type]
    model, optimizer, data = accelerator.prepare(model, optimizer, data)
    step, total, norm = 0, torch.zeros(()), torch.zeros(())
    for batch in data:
        with accelerator.accumulate(model):
            loss = model(batch).pow(2).mean()
            total += accelerator.gather(loss.detach().reshape(1)).mean() / MICRO_BATCHES
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                norm = accelerator.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            step += 1
            accelerator.log({"loss": float(total)}, step=step)
            logged = {"step": step, "loss": float(total), "grad_norm": float(norm)}
            accelerator.print(json.dumps(logged), flush=True)
            total = torch.zeros(())
    # Gloo's threads may still hold tensors of the last collective: the end would wait for them, and
    # they for the GIL (torch 2.13).
    time.sleep(0.3)
    accelerator.end_training()


if __name__ == "__main__":
    main()
