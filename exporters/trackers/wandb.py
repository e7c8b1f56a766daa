"""Weights & Biases: a separate run, in the group of the run's name."""

import secrets
from collections.abc import Mapping
from pathlib import Path

import wandb

from mp_agent.exporters.trackers.client import TrackedRun, file_url

_STEP = "mp_agent/step"


class WandbClient:
    """A W&B run; project, entity, mode and key are those of the variables WANDB_*."""

    def __init__(self, run: TrackedRun) -> None:
        self.name = f"{run.name} (mp_agent)"
        self._run = wandb.init(
            name=self.name,
            group=run.name,
            job_type="mp_agent",
            dir=str(run.directory),
            # Its own run: WANDB_RUN_ID is that of the script.
            id=secrets.token_hex(4),
            reinit="create_new",
            settings=wandb.Settings(
                console="off", silent=True, disable_git=True, disable_code=True, save_code=False
            ),
        )
        self._run.define_metric("mp_agent/*", step_metric=_STEP)
        # Offline it is what `wandb sync` takes: the directory above that of the run's files.
        files = Path(self._run.dir)
        self.url = file_url(files.parent) if self._run.offline else (self._run.url or "")

    def log(self, values: Mapping[str, float], step: int, time_unix_seconds: float) -> None:
        """Log the numbers of a step; W&B buffers them."""
        self._run.log({**values, _STEP: step})

    def close(self) -> None:
        """Finish the run, which sends what is buffered."""
        self._run.finish()
