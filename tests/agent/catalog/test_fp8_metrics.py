"""What the gauges of FP8 read from the columns, and nothing where there is nothing."""

from mp_agent.catalog.metrics import BY_PROMETHEUS_NAME
from mp_agent.records.columns import FP8
from mp_agent.records.health import LatestValues
from mp_agent.records.views import LayerView
from tests.agent.node.builders import make_run_view
from tests.subtests import each

VALUES = {
    "tensors": 10.0,
    "nonfinite_elements": 2.0,
    "input_elements": 1000.0,
    "input_flushed_elements": 250.0,
    "weight_elements": 64.0,
    "weight_flushed_elements": 0.0,
    "gradient_elements": 0.0,
    "gradient_flushed_elements": 0.0,
    "scaled_tensors": 4.0,
    "saturated_tensors": 1.0,
    "range_used_max": 4.0,
    "range_used_min": 2.0**-10,
    "scale_min": 0.5,
    "scale_max": 64.0,
    "amax_max": 1792.0,
}
EXPECTED = {
    "fp8_saturated_ratio": 0.25,
    "fp8_range_used_max": 4.0,
    "layer_fp8_input_flushed_ratio": 0.25,
    "layer_fp8_weight_flushed_ratio": 0.0,
    "layer_fp8_gradient_flushed_ratio": None,
    "fp8_range_used_min": 2.0**-10,
    "fp8_scale_min": 0.5,
    "fp8_scale_max": 64.0,
    "layer_fp8_saturated_ratio": 0.25,
    "layer_fp8_range_used_max": 4.0,
    "layer_fp8_range_used_min": 2.0**-10,
    "layer_fp8_amax": 1792.0,
}


@each("name", EXPECTED)
@each("values", [VALUES, {}])
def test_a_gauge_reads_its_columns(name, values):
    metric = BY_PROMETHEUS_NAME[f"mp_agent_{name}"]
    assert metric.read is not None
    view: object = make_run_view(latest=LatestValues(families={FP8.name: values}))
    if name.startswith("layer"):
        view = LayerView(name="w", values=values, judged=True, family=FP8.name)
    assert metric.read(view) == (EXPECTED[name] if values else None)


def test_shares_that_are_flushed_are_reported_by_operand():
    metric = BY_PROMETHEUS_NAME["mp_agent_fp8_flushed_ratio"]
    assert metric.read is not None
    found = metric.read(make_run_view(latest=LatestValues(families={FP8.name: VALUES})))
    assert found == {("input",): 0.25, ("weight",): 0.0, ("gradient",): None}


def test_the_library_is_a_label_of_the_formats():
    metric = BY_PROMETHEUS_NAME["mp_agent_formats_info"]
    assert metric.read is not None and metric.labels[-1] == "fp8_library"
    view = make_run_view(facts={"parameter_format": "fp32", "fp8_library": "torchao"})
    assert metric.read(view) == {("", "fp32", "", "", "", "torchao"): 1.0}
