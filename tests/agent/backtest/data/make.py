"""Writes the files next to it with the libraries of TensorBoard and W&B.

Run with tensorboardX and wandb installed: `python tests/agent/backtest/data/make.py`.
"""

import os
import shutil
import tempfile
from pathlib import Path

STEPS = 40
BROKEN_STEP = 31
"""From which on loss and norm are NaN."""


def rows():
    """Yield what a training logs."""
    for step in range(1, STEPS + 1):
        broken = step >= BROKEN_STEP
        yield {
            "train/loss": float("nan") if broken else 2.0 - step / 64,
            "train/grad_norm": float("nan") if broken else 1.0 + step / 32,
            "train/learning_rate": 0.001,
            "train/global_step": step,
        }


def main() -> None:
    """Write the files."""
    os.environ |= {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "WANDB_DISABLE_CODE": "true"}
    import wandb
    from tensorboardX import SummaryWriter

    here = Path(__file__).parent
    with tempfile.TemporaryDirectory() as directory:
        writer = SummaryWriter(directory + "/events")
        for row in rows():
            for name in ("train/loss", "train/grad_norm", "train/learning_rate"):
                writer.add_scalar(name, row[name], row["train/global_step"])
        writer.add_histogram("weights", [1, 2, 3], 1)
        writer.close()
        (events,) = Path(directory, "events").iterdir()
        shutil.copy(events, here / "events.out.tfevents.run")
        run = wandb.init(
            project="p",
            name="my-run",
            dir=directory,
            settings=wandb.Settings(x_disable_stats=True, x_disable_meta=True, console="off"),
        )
        for row in rows():
            run.log(row)
        run.finish()
        (file,) = Path(directory).rglob("*.wandb")
        shutil.copy(file, here / "run.wandb")


if __name__ == "__main__":
    main()
