"""The public function: what it recommends for models with a known weakness."""

import json
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import mp_agent
from mp_agent.catalog.guard import default_policies, with_defaults
from mp_agent.errors import AdviceError, CompareError
from mp_agent.plan.comparison.api import compare
from mp_agent.plan.comparison.model import TOLERANCE
from mp_agent.plan.recommendation.api import LEARNING_RATE, SEARCH_TRIALS, STEPS
from mp_agent.report.numbers import size
from tests.agent.plan.comparison.planted import Overflowing, batch, chain
from tests.agent.plan.evaluation.measured import overflowing_evaluation
from tests.agent.plan.recommendation.models import odd_network
from tests.subtests import each


def recommend(model, given, loss=None, **options):
    return mp_agent.recommend(model, given, loss, **{"steps": 2, "progress": False, **options})


def test_the_defaults_of_the_public_function_are_those_of_the_package():
    defaults = mp_agent.recommend.__kwdefaults__
    assert defaults is not None
    assert (defaults["steps"], defaults["tolerance"]) == (STEPS, TOLERANCE)
    assert defaults["learning_rate"] == LEARNING_RATE
    assert defaults["search_trials"] == SEARCH_TRIALS


def test_a_model_that_overflows_in_fp16_is_not_recommended_plain_fp16():
    found = recommend(chain(Overflowing()), batch(), nn.CrossEntropyLoss(), capability="7.0")
    plan = found.plan
    assert plan.precision == "fp32" or "planted" in plan.keep_fp32
    tried = next(one for one in found.considered if one.precision == "fp16-autocast")
    assert "NaN or Inf" in tried.reason
    assert recommend(
        chain(Overflowing()), batch(), nn.CrossEntropyLoss(), capability="8.0"
    ).plan.precision == ("bf16-autocast")


def test_gradients_that_fp16_cannot_hold_rule_it_out_by_their_share():
    class FarApart(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.large, self.small = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            outputs: torch.Tensor = self.large(x) + 1e-14 * self.small(x)
            return outputs

    given = torch.ones(16, 8), torch.zeros(16, 8)
    found = recommend(FarApart(), given, nn.MSELoss(), capability="7.0")
    assert found.plan.precision == "fp32"
    assert "become zero in FP16" in found.considered[1].reason


def test_a_loss_scale_is_given_with_fp16_and_with_nothing_else():
    model, given, loss = odd_network()
    plan = recommend(model, given, loss, capability="7.0").plan
    assert plan.precision == "fp16-autocast" and plan.loss_scale is not None
    for capability in ("6.1", "8.0"):
        assert recommend(model, given, loss, capability=capability).plan.loss_scale is None


def test_weights_in_bf16_are_for_memory_and_only_where_updates_survive():
    model, given, loss = odd_network()
    options = {"goal": "memory", "capability": "8.0"}
    assert recommend(model, given, loss, **options).plan.precision == "bf16-autocast"
    found = recommend(model, given, loss, **options, learning_rate=0.1)
    assert found.plan.precision == "bf16"
    assert found.memory_planned.total_bytes < 0.6 * found.memory_fp32.total_bytes


def test_without_a_gpu_nothing_is_invented(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    model, given, loss = odd_network()
    found = recommend(model, given, loss)
    assert found.plan.device == "cpu" and found.speed is None
    hardware = found.environment.hardware
    assert hardware.compute_capability is None and hardware.tensor_cores is None
    assert found.environment.versions["driver"] is None or hardware.kind == "cuda"
    assert any("no CUDA GPU was found" in note for note in found.notes)
    given_gpu = recommend(model, given, loss, capability="9.0").environment.hardware
    assert not given_gpu.detected and given_gpu.memory_bytes is None


def test_the_recommendation_is_plain_json_with_its_plan():
    model, given, loss = odd_network()
    document = json.loads(recommend(model, given, loss, capability="8.0").as_json())
    assert document["format"] == "mp_agent recommendation"
    assert document["plan"]["precision"] == "bf16-autocast"
    assert document["odd_modules"][0]["dimensions"] == [50]
    parts = {key: value for key, value in document["memory_fp32"].items() if key != "total_bytes"}
    assert document["memory_fp32"]["total_bytes"] == sum(parts.values())


def test_an_iterator_and_a_loader_give_a_batch_per_step():
    model, (inputs, target), loss = odd_network()
    loader = DataLoader(TensorDataset(inputs, target), batch_size=8)
    losses = recommend(model, loader, loss, steps=4).gradients.losses
    assert losses == recommend(model, iter(list(loader)), loss, steps=4).gradients.losses
    assert len(set(losses)) == 4


def test_sparse_gradients_and_complex_weights_are_measured_as_what_they_hold():
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(32, 8, sparse=True)
            self.phase = nn.Parameter(torch.randn(8, dtype=torch.complex64))

        def forward(self, x):
            return (self.table(x) * self.phase).abs().square().mean()

    found = recommend(Model(), torch.arange(16), None, steps=2)
    assert "sparse gradients were made dense: AdamW takes no others" in found.notes
    memory = found.memory_fp32
    assert memory.weights_bytes == 4 * (32 * 8 + 2 * 8)


@each(
    ("change", "message"),
    [
        ({"goal": "fun"}, "goal: 'fun' is none of speed, memory, stability"),
        ({"steps": 0}, "steps: 0 is not a whole number from 1 up"),
        ({"steps": 2.5}, "steps: 2.5 is not"),
        ({"learning_rate": float("nan")}, "learning_rate: nan is not a positive number"),
        ({"tolerance": "much"}, "tolerance: 'much' is not a number"),
        ({"search_trials": -1}, "search_trials: -1"),
        ({"capability": "new"}, "capability: 'new' is not a compute capability"),
        ({"given": iter(())}, "batch: the tuple_iterator is empty"),
        ({"model": 3}, "model: int is not a torch.nn.Module"),
        ({"model": nn.ReLU()}, "model: ReLU has no parameter that is trained"),
    ],
)
def test_a_wrong_argument_is_named(change, message):
    model, given, loss = odd_network()
    arguments = {"model": model, "given": given, "loss": loss, **change}
    with pytest.raises(AdviceError) as caught:
        recommend(**arguments)
    assert message in str(caught.value)


def test_a_model_that_cannot_be_copied_is_refused_like_by_the_comparison():
    model = nn.LazyLinear(4)
    with pytest.raises(CompareError, match="is not initialized"):
        recommend(model, torch.randn(2, 3))


def test_compare_and_recommend_judge_a_healthy_model_in_bf16_alike():
    model, given, loss = odd_network()
    # Outputs of such a size differ by more than 0.001 from rounding alone.
    with torch.no_grad():
        for parameter in model[-1].parameters():
            parameter.mul_(10)
    for tolerance, taken in ((TOLERANCE, True), (1e-3, False)):
        (compared,) = compare(
            model, given, loss, dtypes=["bf16-autocast"], tolerance=tolerance, search_trials=0
        ).candidates
        assert compared.verdict.mean_abs > 1e-3
        options = {"capability": "8.0", "tolerance": tolerance, "search_trials": 0}
        tried = recommend(model, given, loss, **options).considered[0]
        assert (tried.precision, tried.accepted) == ("bf16-autocast", taken)
        assert compared.verdict.passed is taken
        assert taken or tried.reason == "; ".join(compared.verdict.reasons)


def test_a_plan_says_how_to_run_the_guard():
    model, given, loss = odd_network()
    found = recommend(model, given, loss, capability="8.0")
    guard = found.plan.settings["guard"]
    assert list(guard) == [*default_policies(), "request_checkpoint"]
    with_defaults(guard)
    assert '    guard={\n        "skip_nonfinite": {},\n' in found.code()
    scaled = recommend(model, given, loss, capability="7.0")
    guard = with_defaults(scaled.plan.settings["guard"])
    floor = float(guard["raise_loss_scale"]["floor"])
    assert scaled.plan.loss_scale is not None
    assert 1.0 <= floor <= scaled.plan.loss_scale / 16 and "reset_loss_scale" in guard
    (reason,) = (one for one in scaled.reasons if one.subject == "guard")
    assert f"kept at {floor:g} or above" in reason.text


def test_memory_that_is_there_limits_the_plan_or_refuses_it():
    model, given, loss = odd_network()
    free = recommend(model, given, loss, capability="8.0")
    assert free.plan.precision == "bf16-autocast"
    needed = free.memory_planned.total_bytes
    options = {"capability": "8.0", "learning_rate": 0.1}
    assert recommend(model, given, loss, memory_bytes=needed, **options).plan == (
        recommend(model, given, loss, **options).plan
    )
    less = recommend(model, given, loss, memory_bytes=needed * 2 // 3, **options)
    assert less.plan.precision == "bf16"
    assert less.memory_planned.total_bytes <= needed * 2 // 3
    reasons = {one.precision: one.reason for one in less.considered}
    assert f"needs about {size(needed)}, and {size(needed * 2 // 3)} is" in reasons["bf16-autocast"]
    with pytest.raises(AdviceError, match=r"memory: no plan fits: .*fp32: a training step needs"):
        recommend(model, given, loss, memory_bytes=1000, **options)


def test_what_was_measured_of_a_plan_changes_the_next_one_and_says_why():
    model, given, loss = odd_network()
    first = recommend(model, given, loss, capability="8.0")
    broken = replace(overflowing_evaluation(), plan=first.plan, device="cuda")
    noise = replace(
        broken,
        loss_difference_ratio=0.2,
        perturbed_difference_ratio=0.001,
        # The machine's own speed, which may be below that of FP32, is not what is tried here.
        speed_interval=(0.5, 2.0),
    )
    found = recommend(model, given, loss, capability="8.0", evaluations=[noise])
    assert found.plan.precision == "fp16-autocast"
    assert found.considered[0].reason == (
        "measured: the loss differs from that of FP32 by 20 % (bad), FP32 from itself by 0.10 %"
    )
    for harmless in (
        replace(noise, perturbed_difference_ratio=0.15),
        replace(noise, loss_difference_ratio=0.04),
    ):
        again = recommend(model, given, loss, capability="8.0", evaluations=[harmless])
        assert again.plan.precision == "bf16-autocast"


def test_bf16_is_advised_against_for_reinforcement_learning():
    model, given, loss = odd_network()
    found = recommend(model, given, loss, capability="8.0", reinforcement=True)
    assert found.plan.precision == "fp16-autocast"
    assert "24 times smaller" in found.considered[0].reason


def test_the_second_moment_of_adam_can_move_in_bf16():
    model, given, loss = odd_network()
    options = {"goal": "memory", "capability": "8.0", "learning_rate": 0.1}
    found = recommend(model, given, loss, **options)
    assert found.plan.adam_beta2 == 0.95 and "betas=(0.9, 0.95)" in found.code()
    moment = torch.ones(1, dtype=torch.bfloat16)
    for beta2, moves in ((0.999, False), (found.plan.adam_beta2, True)):
        after = moment.clone().mul_(beta2).addcmul_(moment, moment * 0, value=1 - beta2)
        assert bool(after != moment) is moves
    assert recommend(model, given, loss, capability="8.0").plan.adam_beta2 == 0.999
