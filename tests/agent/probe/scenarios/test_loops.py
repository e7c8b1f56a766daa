"""A script as many people write it: accumulation, scaler, evaluation, checkpoints."""

import pytest
import torch
from torch.nn.utils import clip_grad_norm_

from mp_agent.records.columns import GRADIENT_POSITIONS
from mp_agent.records.steps import Phase
from tests.agent.probe.small_model import make_loss, make_model, sum_squares

_ACCUMULATED, _INTERVAL, _STEPS = 4, 2, 6


class Script:
    """A loop in the manner of nanoGPT; notes what it computes and where its rank stands."""

    def __init__(self, watched) -> None:
        self.losses: list[float] = []
        self.squares: list[float] = []
        self.phases: set[Phase] = set()
        self._watched = watched
        self._model = make_model()
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-3)
        self._scaler = torch.amp.GradScaler("cpu", init_scale=256.0)

    def __reduce__(self):  # while a checkpoint is written
        self.phases.add(self._watched.state().phase)
        return (str, ())

    @torch.no_grad()
    def _estimate_loss(self) -> float:
        self._model.eval()
        losses = [make_loss(self._model, seed).item() for seed in range(3)]
        self.phases.add(self._watched.state().phase)
        self._model.train()
        return sum(losses) / len(losses)

    def run(self, path) -> None:
        for step in range(_STEPS):
            if step and step % _INTERVAL == 0:
                self._estimate_loss()
                torch.save({"model": self._model.state_dict(), "script": self}, path)
            total = 0.0
            for micro in range(_ACCUMULATED):
                loss = make_loss(self._model, 10 * step + micro) / _ACCUMULATED
                total += loss.item()
                self._scaler.scale(loss).backward()
            self.losses.append(total)
            self._scaler.unscale_(self._optimizer)
            self.squares.append(sum_squares(self._model))
            clip_grad_norm_(self._model.parameters(), 1e-2)
            self._scaler.step(self._optimizer)
            self._scaler.update()
            self._optimizer.zero_grad(set_to_none=True)


def test_a_loop_with_everything_shows_what_it_computes_itself(watch, tmp_path):
    watched = watch()
    script = Script(watched)
    script.run(tmp_path / "checkpoint.pt")
    contents = watched.read()
    assert contents.column("loss") == pytest.approx(script.losses)
    assert [
        record.gradients[0, GRADIENT_POSITIONS["sum_squares"]] for record in contents.records
    ] == pytest.approx(script.squares)
    assert contents.column("clip_norm") == pytest.approx([s**0.5 for s in script.squares])
    assert [record.step for record in contents.records] == list(range(1, _STEPS + 1))
    assert script.phases == {Phase.EVAL, Phase.CHECKPOINT}
    assert contents.state.probe_errors == 0


def test_clipping_of_a_model_whose_first_layer_is_in_no_optimizer_is_seen(watch):
    watched, model = watch(), make_model()
    held = list(model.parameters())[2:]
    optimizer = torch.optim.SGD(held, lr=0.01)
    squares = []
    for seed in range(4):
        model.zero_grad()
        make_loss(model, seed).backward()
        grads = [parameter.grad for parameter in held if parameter.grad is not None]
        squares.append(sum(float(grad.square().sum()) for grad in grads))
        clip_grad_norm_(model.parameters(), 1e-2)
        optimizer.step()

    contents = watched.read()
    assert [
        record.gradients[0, GRADIENT_POSITIONS["sum_squares"]] for record in contents.records
    ] == pytest.approx(squares)
    assert contents.column("clip_max_norm") == pytest.approx([1e-2] * 4)
