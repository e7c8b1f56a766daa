"""The simulated run is a real one: its rows go the whole way, and come out as the model says."""

from dataclasses import replace

import pytest

from benchmarks.many_nodes.live import Load, measure
from benchmarks.many_nodes.model import Model
from benchmarks.many_nodes.stages import measure_rendering, measure_stages
from mp_agent.catalog.metrics import METRICS, Scope
from mp_agent.settings import Settings

LAYERS = 30
STEPS = 36
QUICK = Load(
    step_seconds=0.05,
    push_interval_seconds=0.2,
    warm_up_steps=10,
    steady_steps=8,
    table_steps=18,
    fleets=1,
)


@pytest.mark.slow
def test_the_root_says_what_the_model_says():
    model = Model(nodes=4, placement="fsdp", layers=LAYERS, ranks_per_node=2)
    result = measure(model, QUICK)

    assert list(result.mistakes()) == []
    assert 19 < result.step <= STEPS, "steps after the sampled one were closed"
    assert result.failures == 0
    assert result.requests_per_second > 0
    assert result.final.value("mp_agent_nodes_known", node_rank="0") == 4


@pytest.mark.slow
def test_a_killed_root_and_silent_nodes_cost_no_row():
    model = Model(nodes=12, placement="fsdp", layers=LAYERS, ranks_per_node=2, nan_steps=11)
    load = replace(QUICK, step_seconds=0.1, table_steps=12, trouble_steps=90, drain_seconds=8.0)
    result = measure(model, load)

    assert list(result.mistakes()) == []
    assert result.step == 10 + 8 + 12 + 90, "what waited on the nodes came in"
    assert len(result.nan_seconds) == (10 + 8 + 12) // 11


@pytest.mark.slow
@pytest.mark.parametrize("placement", ["ddp", "fsdp", "hsdp"])
def test_the_stages_merge_to_the_closed_form(placement: str):
    model = Model(nodes=3, placement=placement, layers=LAYERS, ranks_per_node=4)
    stages = measure_stages(model)

    assert stages.nodes == 3
    assert stages.report_bytes > 0


@pytest.mark.slow
def test_layers_that_every_rank_has_are_not_pushed():
    def bytes_of(placement: str, layers: int) -> float:
        return measure_stages(Model(nodes=2, placement=placement, layers=layers)).table_report_bytes

    grows = {name: bytes_of(name, 2 * LAYERS) - bytes_of(name, LAYERS) for name in ("ddp", "fsdp")}
    assert grows["ddp"] < 100 < grows["fsdp"]


def test_a_scrape_stays_below_the_cap_on_series():
    settings = Settings(max_series=500)
    rendering = measure_rendering(400, settings=settings)

    layer_metrics = sum(metric.scope is Scope.LAYER for metric in METRICS)
    assert layer_metrics * 400 > 500
    assert 400 < rendering.series <= 500
