"""What torchtitan's trainer knows of a step, and a logger for its metrics."""

from typing import Any

import torch
from torchtitan.components.metrics import BaseLogger

import mp_agent
from mp_agent.integrations import ConditionLog, numbers_of


class MpAgentLogger(BaseLogger):
    """Logs what torchtitan's own loggers log, and conditions, as `mp_agent/<name>`."""

    def __init__(self, logger: BaseLogger) -> None:
        self._logger = logger
        self._conditions = ConditionLog()

    def log(self, metrics: dict[str, Any], step: int) -> None:
        """Log the metrics, then the conditions that have begun or ceased since the last time."""
        self._logger.log(metrics, step)
        for event in self._conditions.taken():
            self._logger.log(numbers_of(event), step)

    def close(self) -> None:
        """Close torchtitan's own loggers."""
        self._logger.close()


class _Steps:
    """Passes on number, loss and tokens of each step."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._step = -1
        self._loss: torch.Tensor | None = None
        self._tokens: int | None = None

    def observe(self, loss: torch.Tensor) -> None:
        """Add a micro-batch [] whose loss was divided by the tokens of all ranks.

        The mean over ranks, which is exported, is then torchtitan's global average. A pipeline has
        the loss on its last stage alone, where the probe finds it.
        """
        trainer, dims = self._trainer, self._trainer.parallel_dims
        if trainer.step != self._step:
            self._step, self._loss = trainer.step, None
        if not dims.pp_enabled:
            part = loss.detach().to(torch.float64) * (dims.dp_replicate * dims.dp_shard * dims.cp)
            self._loss = part if self._loss is None else self._loss + part
        mp_agent.observe(loss=self._loss, step=trainer.step, tokens=self._new_tokens())

    def _new_tokens(self) -> int:
        """Return this rank's tokens since the last call; ranks that share them share the count."""
        dims = self._trainer.parallel_dims
        total = int(self._trainer.ntokens_seen // (dims.tp * dims.pp))
        before = self._tokens if self._tokens is not None else total
        self._tokens = total
        return total - before

    def begin(self) -> None:
        """Count tokens from here on: those that a checkpoint holds were counted before."""
        self._new_tokens()


def watch(trainer: Any, **settings: Any) -> None:
    """Attach mp_agent to a torchtitan `Trainer`, on every rank, before `trainer.train()`.

    Passes on the trainer's step (also after loading a checkpoint), the loss averaged over all
    tokens, and the tokens; conditions go to the trainer's TensorBoard and W&B loggers. Settings are
    those of `mp_agent.init`.

    Raises SettingError, naming field and value, when a setting is wrong.
    """
    mp_agent.init(**settings)
    trainer.metrics_processor.logger = MpAgentLogger(trainer.metrics_processor.logger)
    steps = _Steps(trainer)
    forward_backward, generate = trainer.forward_backward_step, trainer.batch_generator

    def forward_backward_step(*args: Any, **kwargs: Any) -> Any:
        loss = forward_backward(*args, **kwargs)
        steps.observe(loss)
        return loss

    def batch_generator(*args: Any, **kwargs: Any) -> Any:
        steps.begin()
        return generate(*args, **kwargs)

    trainer.forward_backward_step = forward_backward_step
    trainer.batch_generator = batch_generator
