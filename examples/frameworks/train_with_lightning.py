"""Lightning: `python train_with_lightning.py`, which starts two ranks itself.

The callback marks validation and logs conditions. With `MP_AGENT_ATTACH=1` nothing is needed.
"""

import sys
import tempfile
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader

from mp_agent.integrations.lightning import MpAgentLightningCallback

STEPS = 4


class Regression(LightningModule):
    """Learns to return zeros; logs its loss and the norm of its gradients before clipping."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        """Return the loss []."""
        loss: torch.Tensor = self.model(batch).pow(2).mean()
        self.log("loss", loss, sync_dist=True)
        return loss

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Log the norm, which is alike on all ranks."""
        self.log("grad_norm", nn.utils.get_total_norm([p.grad for p in self.parameters()]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return torch.optim.SGD(self.parameters(), lr=0.05)


def main(directory: str) -> None:
    """Train; Lightning writes `logs/version_0/metrics.csv`."""
    torch.manual_seed(0)
    rows: Any = torch.randn(32, 4)
    trainer = Trainer(
        accelerator="cpu",
        strategy="ddp",
        devices=2,
        max_steps=STEPS,
        gradient_clip_val=0.1,
        log_every_n_steps=1,
        logger=CSVLogger(directory, name="logs", version=0),
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[MpAgentLightningCallback()],
    )
    trainer.fit(Regression(), DataLoader(rows, batch_size=2))


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp())
