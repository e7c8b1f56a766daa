"""Where the ring says that the rank stands."""

import threading
from typing import Any

import pytest
import torch
from torch.distributed import checkpoint

from mp_agent.records.steps import Phase
from tests.agent.probe.small_model import make_loss, make_model


class TestPhase:
    def test_follows_training(self, watch):
        watched, model = watch(), make_model()
        optimizer = torch.optim.SGD(model.parameters())
        seen: list[Phase] = []
        next(model.parameters()).register_hook(lambda _: seen.append(watched.state().phase))
        loss = make_loss(model)
        loss.backward()
        seen.append(watched.state().phase)
        optimizer.register_step_post_hook(lambda *_: seen.append(watched.state().phase))
        optimizer.step()
        seen.append(watched.state().phase)
        assert seen == [Phase.BACKWARD, Phase.FORWARD, Phase.OPTIMIZER, Phase.FORWARD]

    def test_stays_in_a_backward_that_raised_until_training_or_evaluation_goes_on(self, watch):
        trained = Trained(watch)
        handle = next(trained.model.parameters()).register_hook(lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            make_loss(trained.model).backward()
        assert trained.phase() is Phase.BACKWARD
        trained.model.eval()
        assert phase_without_gradients(trained) is Phase.EVAL
        trained.model.train()
        handle.remove()
        trained.step()
        assert trained.phase() is Phase.FORWARD

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


class Trained:
    """A model that has made a step under a watch, and where its rank stands now."""

    def __init__(self, watch) -> None:
        self.watched, self.model = watch(), make_model()
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.step()

    def step(self) -> None:
        make_loss(self.model).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def phase(self) -> Phase:
        phase: Phase = self.watched.state().phase
        return phase


@pytest.fixture
def trained(watch) -> Trained:
    return Trained(watch)


@torch.no_grad()
def phase_without_gradients(trained: Trained) -> Phase:
    return trained.phase()


class TestEvaluation:
    def test_is_seen_by_the_models_mode(self, trained):
        trained.model.eval()
        assert trained.phase() is Phase.EVAL
        trained.model(torch.ones(1, 4))
        trained.model.train()
        assert trained.phase() is Phase.FORWARD

    def test_of_a_model_that_holds_the_trained_one_is_seen(self, trained):
        torch.nn.ModuleList([trained.model, torch.nn.Linear(2, 2)]).eval()
        assert trained.phase() is Phase.EVAL

    def test_is_over_with_the_next_backward(self, trained):
        trained.model.eval()
        seen = []
        trained.model[0].weight.register_hook(lambda _: seen.append(trained.phase()))
        trained.step()
        assert (seen, trained.phase()) == ([Phase.BACKWARD], Phase.FORWARD)

    @pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
    def test_is_seen_by_a_stretch_without_gradients(self, trained, context):
        with context():
            with torch.no_grad():
                assert trained.phase() is Phase.EVAL
            assert trained.phase() is Phase.EVAL
        assert trained.phase() is Phase.FORWARD

    def test_is_seen_by_a_decorator(self, trained):
        assert phase_without_gradients(trained) is Phase.EVAL
        assert trained.phase() is Phase.FORWARD

    def test_is_seen_by_batches_that_are_loaded_without_gradients(self, trained):
        rows: Any = torch.ones(3, 4)
        batches: torch.utils.data.DataLoader[torch.Tensor] = torch.utils.data.DataLoader(rows)
        torch.set_grad_enabled(False)
        try:
            assert [trained.phase() for _ in batches] == [Phase.EVAL] * 3
        finally:
            torch.set_grad_enabled(True)
        assert [trained.phase() for _ in batches] == [Phase.FORWARD] * 3

    def test_is_over_though_it_raised(self, trained):
        with pytest.raises(KeyError), torch.no_grad():
            raise KeyError
        assert trained.phase() is Phase.FORWARD

    def test_of_another_model_or_of_a_part_is_training(self, trained):
        make_model().eval()
        trained.model[0].eval()
        assert trained.phase() is Phase.FORWARD

    def test_is_not_what_torch_does_without_gradients(self, trained):
        seen: list[Phase] = []

        def code(name: str) -> None:
            look = "@torch.no_grad()\ndef look(trained): seen.append(trained.phase())"
            names: dict[str, Any] = {"__name__": name, "torch": torch, "seen": seen}
            exec(look, names)
            names["look"](trained)

        code("torch.distributed.fsdp.inner")
        code("my_training")
        assert seen == [Phase.FORWARD, Phase.EVAL]

    def test_gives_way_to_a_phase_that_the_user_names(self, trained):
        with trained.watched.probe.phase("warm-up"), torch.no_grad():
            assert trained.phase() is Phase.OTHER
        assert trained.phase() is Phase.FORWARD

    def test_before_the_first_step_is_still_the_start(self, watch):
        watched, model = watch(), make_model()
        watched.probe.connect()
        with torch.no_grad():
            model.eval()
            assert watched.state().phase is Phase.STARTING

    def test_within_an_optimizer_is_none(self, trained):
        seen = []

        class Slow(torch.optim.SGD):
            @torch.no_grad()
            def step(self, closure=None):
                seen.append(trained.phase())
                return super().step(closure)

        make_loss(trained.model).backward()
        Slow(trained.model.parameters(), lr=0.1).step()
        assert seen == [Phase.OPTIMIZER]


class Looking:
    """Notes the phase while it is pickled."""

    def __init__(self, trained: Trained) -> None:
        self.trained = trained
        self.seen: list[Phase] = []

    def __reduce__(self):
        self.seen.append(self.trained.phase())
        return (str, ())


class TestSaving:
    def test_by_torch_is_seen(self, trained, tmp_path):
        looking = Looking(trained)
        torch.save({"state": looking}, tmp_path / "file.pt")
        assert set(looking.seen) == {Phase.CHECKPOINT}
        assert trained.phase() is Phase.FORWARD

    def test_is_over_though_it_raised(self, trained, tmp_path):
        with pytest.raises((RuntimeError, OSError)):
            torch.save({}, tmp_path / "absent" / "file.pt")
        assert trained.phase() is Phase.FORWARD

    # Both are of torch 2.6 itself.
    @pytest.mark.filterwarnings("ignore:torch.distributed is unavailable:UserWarning")
    @pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning")
    def test_of_a_distributed_checkpoint_is_seen(self, trained, tmp_path):
        class Stateful:
            def state_dict(self):
                seen.append(trained.phase())
                return {"value": torch.ones(1)}

            def load_state_dict(self, state):
                raise AssertionError

        seen: list[Phase] = []
        module: Any = checkpoint
        module.save({"of": Stateful()}, checkpoint_id=tmp_path / "checkpoint")
        assert seen == [Phase.CHECKPOINT]
        assert trained.phase() is Phase.FORWARD

    def test_as_safetensors_is_seen_by_all_that_imported_it(self, trained, tmp_path, framework):
        framework("safetensors")
        from safetensors.torch import save_file

        seen = []

        class Path(type(tmp_path)):  # type: ignore[misc] # the concrete class, before 3.12
            def __fspath__(self):
                seen.append(trained.phase())
                return super().__fspath__()

        save_file({"weight": torch.ones(2)}, Path(tmp_path / "file.safetensors"))
        assert Phase.CHECKPOINT in seen
        assert trained.phase() is Phase.FORWARD

    def test_by_a_thread_in_the_background_is_none(self, trained, tmp_path):
        looking = Looking(trained)
        thread = threading.Thread(target=torch.save, args=(looking, tmp_path / "file.pt"))
        thread.start()
        thread.join()
        assert set(looking.seen) == {Phase.FORWARD}


def test_everything_is_put_back(watch):
    before = [vars(owner)[name] for owner, name in REPLACED]
    watched = watch()
    assert all(vars(o)[n] is not b for (o, n), b in zip(REPLACED, before, strict=True))
    watched.probe.detach()
    assert [vars(owner)[name] for owner, name in REPLACED] == before


REPLACED = [
    (torch.nn.Module, "train"),
    (torch.nn.Module, "zero_grad"),
    (torch.optim.Optimizer, "zero_grad"),
    (torch.optim.lr_scheduler.LRScheduler, "step"),
    (torch.no_grad, "__enter__"),
    (torch.no_grad, "__exit__"),
    (torch.inference_mode, "__enter__"),
    (torch, "save"),
    (checkpoint, "save"),
]
