"""A checkpoint from which a run goes on as if nothing had happened: the scaler is part of it."""

import os
import tempfile
from pathlib import Path

import torch

model = torch.nn.Linear(4, 1)
optimizer = torch.optim.AdamW(model.parameters())
scaler = torch.amp.GradScaler("cpu")


def save(path: Path, step: int) -> None:
    """Write the whole state; a crash in the middle leaves the checkpoint before it in place."""
    state = {
        "step": step,
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scaler": scaler.state_dict(),
        "random": torch.get_rng_state(),
    }
    torch.save(state, path.with_suffix(".partial"))
    os.replace(path.with_suffix(".partial"), path)


def resume(path: Path) -> int:
    """Restore the state and return the step to go on from; 0 without a checkpoint."""
    if not path.exists():
        return 0
    state = torch.load(path, weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    scaler.load_state_dict(state["scaler"])
    torch.set_rng_state(state["random"])
    return int(state["step"])


with tempfile.TemporaryDirectory() as directory:
    path = Path(directory) / "last.pt"
    assert resume(path) == 0
    save(path, step=1200)
    assert resume(path) == 1200
