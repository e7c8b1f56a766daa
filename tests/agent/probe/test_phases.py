"""Where the ring says that the rank stands."""

import pytest
import torch

from mp_agent.records.steps import Phase
from tests.agent.probe.small_model import make_loss, make_model


class TestPhase:
    def test_follows_training(self, watch):
        watched, model = watch(), make_model()
        optimizer = torch.optim.SGD(model.parameters())
        seen = []
        model[0].weight.register_hook(lambda _: seen.append(watched.state().phase))
        loss = make_loss(model)
        loss.backward()
        seen.append(watched.state().phase)
        optimizer.register_step_post_hook(lambda *_: seen.append(watched.state().phase))
        optimizer.step()
        seen.append(watched.state().phase)
        assert seen == [Phase.BACKWARD, Phase.FORWARD, Phase.OPTIMIZER, Phase.FORWARD]

    @pytest.mark.parametrize(
        ("name", "expected"),
        [
            ("eval", (Phase.EVAL, "eval")),
            ("checkpoint", (Phase.CHECKPOINT, "checkpoint")),
            ("warm-up", (Phase.OTHER, "warm-up")),
        ],
    )
    def test_is_as_the_user_says_until_left(self, watch, name, expected):
        watched = watch()
        watched.probe.connect()
        with watched.probe.phase("outer"):
            with watched.probe.phase(name):
                state = watched.state()
                assert (state.phase, state.phase_name) == expected
            assert watched.state().phase_name == "outer"
        assert watched.state().phase is Phase.STARTING

    def test_lets_exceptions_of_the_user_through(self, watch):
        with pytest.raises(KeyError), watch().probe.phase("eval"):
            raise KeyError
