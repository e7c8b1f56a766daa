"""What the detectors are fed with."""

from mp_agent.catalog.metric import Kind, Scope
from mp_agent.catalog.metrics import METRICS
from mp_agent.catalog.thresholds import resolve
from mp_agent.node.conditions.metric_reader import MetricReader
from tests.agent.node.series.test_snapshot_builder import export

_NAMES = frozenset(metric.prometheus_name for metric in METRICS)


def test_between_two_judgements_every_gauge_of_the_run_is_read_labelled_ones_too():
    reader, run = MetricReader(_NAMES, resolve({})), export()
    assert run.view is not None
    names = {
        metric.prometheus_name
        for metric in METRICS
        if metric.kind is Kind.GAUGE and metric.scope is Scope.RUN
    }
    expected = {key: value for key, value in reader.all_series(run) if key[0] in names}
    assert dict(reader.gauges(run.view)) == expected
    assert ("mp_agent_grad_norm", ()) in expected
    assert ("mp_agent_grad_finite", ()) in expected
