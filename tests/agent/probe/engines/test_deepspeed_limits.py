"""Engines that are not known to be measured right are named."""

from types import SimpleNamespace
from typing import Any

from mp_agent.probe.engines.deepspeed import unsupported_by
from tests.subtests import each


class SuperOffloadOptimizer_Stage3(SimpleNamespace):
    pass


class MiCS_Optimizer(SimpleNamespace):
    pass


class MuonWithAuxAdam:
    pass


def engine(optimizer: Any = None, **changes: Any) -> SimpleNamespace:
    facts = {"device": "cuda:0", "optimizer": optimizer or SimpleNamespace()}
    return SimpleNamespace(**{**facts, **changes})


def test_a_plain_engine_is_measured():
    plain = engine(
        SimpleNamespace(cpu_offload=False, optimizer=object()),
        pipeline_parallelism=False,
        has_moe_layers=False,
        zenflow=False,
        mpu=None,
        autotp_size=lambda: 1,
        is_deepcompile_active=lambda: False,
    )
    assert unsupported_by(plain) == ""


def test_offload_is_measured_where_nothing_is_copied_asynchronously():
    assert unsupported_by(engine(SimpleNamespace(cpu_offload=True), device="cpu")) == ""


@each(
    ("watched", "reason"),
    [
        (engine(pipeline_parallelism=True), "DeepSpeed's pipeline parallelism"),
        (engine(has_moe_layers=True), "DeepSpeed's experts"),
        (engine(autotp_size=lambda: 2), "DeepSpeed with model parallelism"),
        (
            engine(mpu=SimpleNamespace(get_model_parallel_world_size=lambda: 2)),
            "DeepSpeed with model parallelism",
        ),
        (engine(zenflow=True), "DeepSpeed's ZenFlow"),
        (engine(SuperOffloadOptimizer_Stage3()), "DeepSpeed's SuperOffload"),
        (engine(MiCS_Optimizer()), "DeepSpeed's MiCS"),
        (engine(SimpleNamespace(swap_optimizer=True)), "DeepSpeed's offload of gradients to NVMe"),
        (
            engine(SimpleNamespace(offload_optimizer=True)),
            "DeepSpeed's offload of gradients from an accelerator",
        ),
        (engine(SimpleNamespace(optimizer=MuonWithAuxAdam())), "DeepSpeed's Muon"),
        (engine(is_deepcompile_active=lambda: True), "DeepSpeed's DeepCompile"),
    ],
)
def test_each_of_the_others_is_named(watched, reason):
    assert unsupported_by(watched) == reason


def test_muon_under_the_bf16_optimizer_is_measured_before_its_updates():
    optimizer = SimpleNamespace(optimizer=MuonWithAuxAdam(), fp32_groups_has_gradients=[])
    assert unsupported_by(engine(optimizer)) == ""
