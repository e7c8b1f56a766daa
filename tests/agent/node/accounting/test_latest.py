"""What is not measured on every step keeps its last value."""

from dataclasses import replace

import numpy as np
import pytest

from mp_agent.catalog.metrics import BY_PROMETHEUS_NAME
from mp_agent.catalog.thresholds import resolve
from mp_agent.node.accounting.accumulator import Accumulator, CounterStore
from mp_agent.node.accounting.progress import Progress
from mp_agent.node.merge.run_layers import MergedLayers
from mp_agent.records.columns import GRADIENTS
from mp_agent.records.merged import Comparison, MergedStep, OptimizerStep, Reduction
from mp_agent.records.views import RunView
from tests.agent.node.builders import gradient_row, make_run_view, merged_step

SAMPLED = "abs_median"


@pytest.fixture(autouse=True)
def declared(monkeypatch):
    """Declare a column of the gradients that is not measured on every step."""
    monkeypatch.setitem(GRADIENTS.__dict__, "sampled", (SAMPLED,))


@pytest.fixture
def account() -> Accumulator:
    return Accumulator(
        resolve({}), progress=Progress(), counters=CounterStore(), window_seconds=120.0
    )


def step(sequence: int, norm: float, median: float | None = None, **values: float) -> MergedStep:
    plain = merged_step(sequence, norm=norm, **values)
    own = dict(plain.gradients)
    if median is not None:
        own[SAMPLED] = median
    return replace(plain, step=1000 + sequence, families={GRADIENTS.name: own})


def view(account: Accumulator) -> RunView:
    return account.view(make_run_view(), 1_000.0)


def judged(account: Accumulator) -> MergedStep:
    step = view(account).latest.judged
    assert step is not None
    return step


def sampled_step(account: Accumulator) -> object:
    read = BY_PROMETHEUS_NAME["mp_agent_sampled_step"].read
    assert read is not None
    return read(view(account))


def test_a_sampled_value_stays_until_the_next_sample_and_has_its_step(account):
    account.fold_step(step(1, 1.0))
    assert judged(account).get(SAMPLED) is None
    assert sampled_step(account) == {}

    shown = []
    for sequence, median in enumerate((0.5, None, None, 0.25, None), 2):
        account.fold_step(step(sequence, float(sequence), median))
        latest = judged(account)
        shown.append((latest.grad_norm, latest.get(SAMPLED), sampled_step(account)))
    assert shown == [
        (2.0, 0.5, {("gradients",): 1002.0}),
        (3.0, 0.5, {("gradients",): 1002.0}),
        (4.0, 0.5, {("gradients",): 1002.0}),
        (5.0, 0.25, {("gradients",): 1005.0}),
        (6.0, 0.25, {("gradients",): 1005.0}),
    ]


def test_a_sample_of_a_step_that_does_not_count_is_not_shown(account):
    account.fold_step(step(1, 1.0, 0.5))
    account.fold_step(step(2, 1.0, 9.0, skipped=1.0))
    account.fold_step(step(3, 1.0, 9.0, nan_elements=1.0))
    account.fold_step(step(4, 2.0))

    assert judged(account).get(SAMPLED) == 0.5
    assert view(account).latest.families[GRADIENTS.name]["sum_squares"] == 4.0
    assert sampled_step(account) == {("gradients",): 1001.0}


def test_the_step_itself_says_only_what_was_measured_on_it(account):
    account.fold_step(step(1, 1.0, 0.5))
    account.fold_step(step(2, 1.0))

    last = view(account).latest.step
    assert last is not None and last.get(SAMPLED) is None


def test_another_optimizer_keeps_its_own(account):
    def with_other(plain: MergedStep, median: float | None) -> MergedStep:
        values = {"sum_squares": 4.0} | ({} if median is None else {SAMPLED: median})
        own = OptimizerStep(
            sequence=plain.sequence,
            families={GRADIENTS.name: values},
            complete=frozenset({GRADIENTS.name}),
        )
        return replace(plain, optimizers={"1": own}, optimizers_held=frozenset({"1"}))

    account.fold_step(with_other(step(1, 1.0, 0.5), 7.0))
    account.fold_step(with_other(step(2, 1.0), None))

    other = view(account).optimizers["1"].judged
    assert other is not None and other.gradients[SAMPLED] == 7.0
    assert judged(account).get(SAMPLED) == 0.5


def test_layers_say_of_which_step_they_are(account):
    table = MergedLayers(
        family=GRADIENTS,
        names=("w",),
        values=np.stack([gradient_row(elements=4.0)]),
        sound=np.ones(1, dtype=bool),
        complete=True,
    )
    account.fold_layers(3, table, step_judged=True, step=1003)
    assert sampled_step(account) == {("gradients",): 1003.0}


def test_a_new_attempt_starts_without_samples(account):
    account.fold_step(step(1, 1.0, 0.5))
    account.begin_attempt()
    account.fold_step(step(1, 1.0))

    assert judged(account).get(SAMPLED) is None
    assert sampled_step(account) == {}


def since(account: Accumulator) -> object:
    read = BY_PROMETHEUS_NAME["mp_agent_nonfinite_since_step"].read
    assert read is not None
    return read(view(account))


def test_a_value_that_stays_has_the_step_of_which_it_is(account):
    account.fold_step(step(1, 1.0, loss=0.5, learning_rate=0.1, loss_scale=64.0))
    account.fold_step(step(2, 1.0, learning_rate=0.2))
    assert view(account).latest.value_steps == {
        "loss": 1001,
        "learning_rate": 1002,
        "loss_scale": 1001,
    }


def test_what_is_not_finite_says_since_when_until_it_is_again(account):
    account.fold_step(step(1, 1.0, loss=0.5, nan_elements=0.0))
    assert since(account) == {}
    account.fold_step(step(2, 1.0, loss_nonfinite=1.0, nan_elements=0.0))
    account.fold_step(step(3, 1.0, loss_nonfinite=1.0, nan_elements=4.0))
    account.fold_step(step(4, 1.0, loss_nonfinite=1.0, inf_elements=4.0))
    assert since(account) == {("loss",): 1002.0, ("gradients",): 1003.0}
    account.fold_step(step(5, 1.0, loss=0.4, nan_elements=0.0))
    assert since(account) == {}


def test_a_step_without_loss_and_gradients_says_nothing_of_them(account):
    """Evaluation between steps, or gradients that are measured on every second step."""
    account.fold_step(step(1, 1.0, loss_nonfinite=1.0, nan_elements=4.0))
    account.fold_step(replace(step(2, 1.0), families={}, columns={}))
    assert since(account) == {("loss",): 1001.0, ("gradients",): 1001.0}


def test_the_mean_of_the_ranks_whose_loss_was_finite_is_not_the_loss_of_the_run(account):
    account.fold_step(step(1, 1.0, loss=0.5))
    account.fold_step(step(2, 1.0, loss=9.0, loss_nonfinite=1.0))
    assert view(account).latest.loss == 0.5


def test_layers_of_which_none_counts_leave_the_step_of_those_that_did(account):
    def table(**columns: float) -> MergedLayers:
        return MergedLayers(
            family=GRADIENTS,
            names=("w",),
            values=np.stack([gradient_row(elements=4.0, **columns)]),
            sound=np.array([not columns]),
            complete=True,
        )

    account.fold_layers(3, table(), step_judged=True, step=1003)
    account.fold_layers(4, table(nan_elements=2.0), step_judged=False, step=1004)
    assert sampled_step(account) == {("gradients",): 1003.0}
    (layer,) = account.layers[GRADIENTS.name].values()
    assert (layer.judged, layer.step, layer.latest.step) == (True, 1003, 1004)
    assert (layer.nonfinite_elements, layer.values["nan_elements"]) == (2.0, 0.0)


def test_the_interval_of_layers_that_was_set_stays_known_once_it_is_stretched(account):
    assert view(account).latest.layer_interval_shortest_steps is None
    for sequence, interval in enumerate((100.0, 400.0, 200.0), start=1):
        account.fold_step(step(sequence, 1.0, layer_interval_steps=interval))
    assert view(account).latest.layer_interval_shortest_steps == 100


def test_a_comparison_is_dropped_once_copies_differ_by_gradients_of_their_own(account):
    equal = {kind: Comparison(agree=True) for kind in ("weights", "state")}
    account.fold_step(replace(step(1, 1.0), replicas=equal))
    assert account.progress.replicas.views.keys() == {"weights", "state"}
    apart = Reduction(reduced=False, withheld=frozenset({"weights"}))
    account.fold_step(replace(step(2, 1.0), reduction=apart))
    assert account.progress.replicas.views.keys() == {"state"}
