from random import Random
from statistics import pstdev

import pytest
from pydantic import TypeAdapter

from mp_agent.catalog.thresholds import resolve
from mp_agent.node.accounting.gradients import ACCEPT_STEPS, NormHistory, NormTracker
from mp_agent.records.columns import GRADIENTS
from mp_agent.records.merged import OptimizerStep
from tests.agent.node.builders import NO_GRADIENTS, merged_step

THRESHOLDS = resolve({})


def fold(watch: NormTracker, *norms: float, risen: bool = False) -> int:
    """Add norms; return how many of them exploded."""
    count = 0
    for norm in norms:
        watch.fold(merged_step(1, norm=norm, nan_elements=0.0), THRESHOLDS, loss_risen=risen)
        count += bool(watch.exploded)
    return count


def jitter(count: int, norm: float, spread: float = 0.2) -> list[float]:
    random = Random(norm)
    return [norm * random.lognormvariate(0, spread) for _ in range(count)]


def watched(*norms: float) -> NormTracker:
    watch = NormTracker()
    fold(watch, *norms)
    return watch


def test_a_norm_far_above_the_usual_one_exploded():
    assert fold(watched(*jitter(200, 1.0)), 9.0, 11.0, 5000.0) == 2


def test_where_the_loss_multiplies_a_norm_is_compared_with_those_of_late():
    """Sums over episodes: a policy that fails early has short ones, and a good one long ones."""
    history = NormHistory()
    for norm in jitter(64, 4.0, 0.6) + jitter(200, 60.0, 0.6):
        history.fold(norm, exploded=False, loss_risen=False)
    assert history.exploded(700.0, THRESHOLDS)
    assert not history.exploded(700.0, THRESHOLDS, multiplies=True)
    assert history.exploded(7000.0, THRESHOLDS, multiplies=True)


@pytest.mark.parametrize("norm", [3e-7, 4000.0, 4e5])
def test_what_was_so_from_the_first_step_is_usual(norm):
    watch = NormTracker()
    assert fold(watch, *jitter(2000, norm)) == 0
    history = watch.history()
    assert history is not None and history.usual == pytest.approx(norm, rel=0.2)


def test_large_norms_of_the_first_steps_are_start_up():
    assert fold(NormTracker(), *[400 * 0.7**step + 12 for step in range(100)]) == 0


def test_a_run_that_explodes_in_its_first_steps_is_found():
    assert fold(NormTracker(), 1.0, 1.2, 1.1, 1.5, 80.0, 3000.0, 9e4) == 3


def test_slow_growth_by_a_thousand_is_found_although_the_usual_norm_follows():
    watch = watched(*jitter(300, 1.0))
    assert fold(watch, *[1.001**step for step in range(8000)]) > 0


def test_a_norm_that_grows_by_two_percent_a_step_is_found():
    assert fold(NormTracker(), *[1.02**step for step in range(350)]) > 150


def test_norms_that_wreck_the_loss_never_become_usual():
    watch = watched(*jitter(200, 1.0))
    assert fold(watch, *jitter(3000, 500.0), risen=True) == 3000


def test_norms_that_do_no_harm_become_usual():
    watch = watched(*jitter(200, 1.0))
    fold(watch, *jitter(ACCEPT_STEPS + 200, 500.0))
    assert fold(watch, *jitter(100, 500.0)) == 0


def test_widely_scattered_norms_must_grow_more():
    watch = watched(*jitter(200, 1.0, spread=1.0))
    assert fold(watch, 15.0) == 0
    assert fold(watch, 1000.0) == 1


def test_another_optimizers_explosion_is_seen_by_its_own_past():
    watch = NormTracker()

    def step(critic: float) -> None:
        values = {**NO_GRADIENTS, "sum_squares": critic**2, "elements": 10.0}
        other = OptimizerStep(
            sequence=1,
            families={GRADIENTS.name: values},
            complete=frozenset({GRADIENTS.name}),
        )
        merged = merged_step(1, norm=1.0, nan_elements=0.0)
        merged = type(merged)(**{**_fields(merged), "optimizers": {"2": other}})
        watch.fold(merged, THRESHOLDS, loss_risen=False)

    for _ in range(100):
        step(0.5)
    assert watch.exploded == {}
    step(2000.0)
    assert watch.exploded == {"2": 2000.0}


def _fields(step):
    return {name: getattr(step, name) for name in step.__dataclass_fields__}


def test_steps_below_the_low_limits_are_counted_in_a_row():
    history = NormHistory()
    for sequence, norm in ((1, 1.0), (2, 1e-8), (3, 1e-8), (14, 0.0), (15, 0.005)):
        history.count_below(norm, sequence, THRESHOLDS)
    # Steps between two that were seen count as well.
    assert history.below == {
        "grad_norm_low": 14, "grad_norm_very_low": 0, "grad_norm_vanished": 0,
    }  # fmt: skip


def test_it_goes_through_the_ledger():
    watch = watched(*jitter(300, 2.0), 900.0)
    adapter = TypeAdapter(NormTracker)
    assert adapter.validate_json(adapter.dump_json(watch)) == watch


def test_the_lowest_of_the_first_norms_is_not_what_is_usual():
    """A run whose norms scatter began, by chance, with low ones."""
    watch = watched(2.0, 3.0, 2.5, *jitter(40, 12.0, 0.6))
    assert fold(watch, 60.0) == 0
    assert fold(watch, 5000.0) == 1


def test_the_deviation_is_that_of_the_last_usual_norms():
    norms = jitter(300, 2.0)
    history = watched(*norms).history()
    assert history is not None and history.deviation == pytest.approx(pstdev(norms[-128:]))
    young = watched(1.0, 2.0).history()
    assert young is not None and young.deviation is None
