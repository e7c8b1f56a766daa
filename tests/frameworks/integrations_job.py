"""`torchrun -m tests.frameworks.integrations_job FRAMEWORK DIRECTORY`: with mp_agent's callback.

Every job stops in the middle and goes on from its checkpoint, as another run.
"""

import json
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

import mp_agent
from mp_agent.probe import attachment
from mp_agent.ring.locations import run_directory
from mp_agent.ring.run_files import ConditionNews, write_conditions
from tests.agent.records.samples import make_event
from tests.frameworks.phases_seen import PhasesSeen
from tests.gloo import end_process_group

STEPS, SAVED_STEP = 6, 3
RANK = int(os.environ["RANK"])

Settings = dict[str, Any]


def settings_of(directory: Path, run: str) -> Settings:
    return {"run": run, "dir": directory, "node_agent": "none", "layer_interval": 2}


def publish_condition(directory: Path, run: str) -> None:
    """Publish what the node agent writes when a condition begins."""
    news = ConditionNews(epoch="a").with_event(make_event())
    write_conditions(run_directory(directory, run), news)


def train_with_transformers(directory: Path) -> None:
    from transformers import TrainerCallback

    from mp_agent.integrations.transformers import MpAgentCallback
    from tests.frameworks.trainer_job import make_trainer

    class Fault(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs) -> None:
            if RANK == 0 and state.global_step == 1:
                publish_condition(directory, "begun")

    dist.init_process_group("gloo")
    options = {"include_num_input_tokens_seen": "all", "optim": "sgd"}
    begun = make_trainer(directory / "trainer", eval_strategy="steps", eval_steps=2, **options)
    begun.add_callback(MpAgentCallback(**settings_of(directory, "begun")))
    begun.add_callback(Fault())
    begun.train()
    mp_agent.shutdown()
    begun.save_state()
    dist.barrier()
    os.environ.update(MP_AGENT_RUN="resumed", MP_AGENT_DIR=str(directory))
    os.environ.update(MP_AGENT_NODE_AGENT="none")
    resumed = make_trainer(directory / "trainer", report_to="mp_agent", **options)
    assert any(type(each) is MpAgentCallback for each in resumed.callback_handler.callbacks)
    resumed.train(resume_from_checkpoint=str(directory / "trainer" / f"checkpoint-{SAVED_STEP}"))
    mp_agent.shutdown()


def train_with_lightning(directory: Path) -> None:
    from lightning.pytorch import Callback, Trainer
    from lightning.pytorch.loggers import CSVLogger

    from mp_agent.integrations.lightning import MpAgentLightningCallback
    from tests.frameworks.lightning_job import Automatic, batches

    class Fault(Callback):
        def on_train_batch_end(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
            if RANK == 0 and trainer.global_step == 1:
                publish_condition(directory, "begun")

    def trainer_for(run: str, steps: int) -> Any:
        return Trainer(
            accelerator="cpu",
            strategy="ddp",
            devices=2,
            max_steps=steps,
            logger=CSVLogger(str(directory), name=run, version=0),
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            val_check_interval=2,
            limit_val_batches=1,
            log_every_n_steps=1,
            callbacks=[Fault(), MpAgentLightningCallback(**settings_of(directory, run))],
        )

    begun = trainer_for("begun", SAVED_STEP)
    module = Automatic()
    with PhasesSeen() as phases:
        begun.fit(module, batches(), batches())
    (directory / f"seen{RANK}.json").write_text(json.dumps({**module.seen, "phases": phases.seen}))
    mp_agent.shutdown()
    begun.save_checkpoint(directory / "saved.ckpt")
    trainer_for("resumed", STEPS).fit(
        Automatic(), batches(), batches(), ckpt_path=str(directory / "saved.ckpt")
    )
    mp_agent.shutdown()


def train_with_accelerate(directory: Path) -> None:
    from accelerate import Accelerator
    from accelerate.tracking import GeneralTracker

    from mp_agent.integrations.accelerate import MpAgentTracker

    class Lines(GeneralTracker):
        """Keeps what is logged, as another library's tracker would."""

        name, requires_logging_directory = "lines", False

        def __init__(self) -> None:
            super().__init__()
            self.lines: list[dict[str, Any]] = []

        @property
        def tracker(self) -> list[dict[str, Any]]:
            return self.lines

        def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
            self.lines.append({**values, "step": step})

    for run, first in (("begun", 0), ("resumed", SAVED_STEP)):
        ours, theirs = MpAgentTracker(logs_steps=True, **settings_of(directory, run)), Lines()
        accelerator = Accelerator(cpu=True, log_with=[ours, theirs])
        ours.accelerator = accelerator
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        model, optimizer = accelerator.prepare(model, optimizer)
        accelerator.init_trackers("project")
        accelerator.log({}, step=first)
        for step in range(first + 1, first + SAVED_STEP + 1):
            torch.manual_seed(10 * step + RANK)
            loss = model(torch.randn(2, 4)).pow(2).mean()
            accelerator.backward(loss)
            norm = accelerator.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
            if RANK == 0 and step == 1:
                publish_condition(directory, run)
            mean = accelerator.gather(loss.detach().reshape(1)).mean().item()
            values = {"loss": mean, "norm": float(norm), "tokens": 8 * dist.get_world_size()}
            accelerator.log(values, step=step)
        mp_agent.shutdown()
        if accelerator.is_main_process:
            (directory / f"{run}.json").write_text(json.dumps(theirs.lines))
    end_process_group(accelerator.end_training)


@contextmanager
def conditions_polled_at_every_step() -> Iterator[None]:
    with patch.object(attachment, "POLL_INTERVAL_SECONDS", 0.0):
        yield


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING)
    train = {
        "transformers": train_with_transformers,
        "lightning": train_with_lightning,
        "accelerate": train_with_accelerate,
    }[sys.argv[1]]
    with conditions_polled_at_every_step():
        train(Path(sys.argv[2]))
    if dist.is_initialized():
        end_process_group()
