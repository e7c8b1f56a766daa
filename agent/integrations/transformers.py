"""A callback for transformers' Trainer, and for what is built on it, such as TRL's trainers."""

from dataclasses import asdict
from typing import Any

from transformers import TrainerCallback
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

import mp_agent
from mp_agent.integrations import ConditionLog


class MpAgentCallback(TrainerCallback):
    """Attaches mp_agent when training begins, and writes conditions into the trainer's log.

    Importing this module makes `TrainingArguments(report_to="mp_agent")` add it too. On each rank
    it passes on the trainer's number of every step; from rank 0, the tokens that the trainer counts
    under `include_num_input_tokens_seen`. Conditions become entries of `state.log_history`, from
    where they reach `trainer_state.json`. Settings are those of `mp_agent.init`.

    Raises SettingError, naming field and value, when training begins with a setting that is wrong.
    """

    def __init__(self, **settings: Any) -> None:
        self._settings = settings
        self._conditions = ConditionLog()
        self._tokens = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Attach to this process; the model is found automatically."""
        mp_agent.init(**self._settings)
        self._tokens = int(state.num_input_tokens_seen)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Pass on the number of the step whose first micro-batch begins."""
        mp_agent.observe(step=state.global_step + 1)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Pass on the tokens since the last step, which the trainer has added up over ranks."""
        tokens = int(state.num_input_tokens_seen) - self._tokens
        self._tokens += tokens
        if args.process_index == 0 and tokens > 0:
            mp_agent.observe(tokens=tokens)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Add the conditions that have begun or ceased to the trainer's history."""
        for event in self._conditions.taken():
            entry = {"step": event.step, "mp_agent": asdict(event)}
            state.log_history.append(entry)


INTEGRATION_TO_CALLBACK["mp_agent"] = MpAgentCallback
