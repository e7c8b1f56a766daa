"""What the detectors are fed with."""

from mp_agent.catalog.metric import Kind, Scope
from mp_agent.catalog.metrics import METRICS
from mp_agent.catalog.thresholds import resolve
from mp_agent.node.accounting.accumulator import CounterStore
from mp_agent.node.conditions.tracker import MetricReader
from mp_agent.records.merged import StepTransition
from tests.agent.node.builders import merged_step
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
    assert dict(reader.moved(run.view, run.counters)) == expected
    assert ("mp_agent_grad_norm", ()) in expected
    assert ("mp_agent_grad_finite", ()) in expected


def test_between_two_judgements_the_counters_that_rose_are_read_once_and_no_others():
    reader, counters = MetricReader(_NAMES, resolve({})), CounterStore()
    view = export().view
    assert view is not None
    rose = merged_step(7, nan_elements=3.0)
    change = StepTransition(step=rose, previous=None, thresholds=resolve({}))
    counters.count(Scope.RUN, (), change)
    read = dict(reader.moved(view, counters))
    assert read["mp_agent_grad_nan_elements_total", ()] == 3.0
    assert read["mp_agent_nonfinite_updates_total", ()] == 1.0
    assert ("mp_agent_grad_inf_elements_total", ()) not in read
    assert read.keys() - dict(reader.moved(view, counters)).keys() >= {
        ("mp_agent_grad_nan_elements_total", ()),
        ("mp_agent_nonfinite_updates_total", ()),
    }
