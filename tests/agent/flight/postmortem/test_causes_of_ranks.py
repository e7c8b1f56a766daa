"""What replicas that differ, and single ranks that are off, show; and what they do not."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest

from mp_agent.flight.postmortem.analysis import remedies_for
from mp_agent.records.columns import LOCAL_GRAD_NORM, step_columns
from mp_agent.records.flight import RankLog, Segment
from mp_agent.records.merged import Comparison, MergedStep, Reduction
from mp_agent.records.schema import UNHELD
from tests.agent.flight.builders import calm, findings_of, make_log, overflow
from tests.agent.node.builders import make_record, make_schema, merged_step
from tests.agent.records.samples import make_condition

EQUAL = Reduction(reduced=True, claimed=True)
OWN = Reduction(reduced=True, claimed=True, everywhere=True)
ALONE = Reduction(reduced=False)
AVERAGED = Reduction(reduced=False, equal_before=True)


def reducing(steps, *parts: tuple[int, Reduction]):
    """Return the steps, so many after each other with each reduction."""
    each = [reduction for count, reduction in parts for _ in range(count)]
    return [replace(step, reduction=one) for step, one in zip(steps, each, strict=True)]


def test_gradients_that_differ_from_a_step_on_were_reduced_by_nothing():
    apart = {"gradients": Comparison(agree=False)}
    steps = reducing(calm(43), (40, EQUAL), (3, OWN))
    steps[40:] = [replace(step, replicas=apart) for step in steps[40:]]
    found = findings_of(steps)
    first = found["gradients_not_reduced"]
    assert next(iter(found)) == "gradients_not_reduced"
    assert (first.step, first.likelihood) == (41, "likely")
    assert found["replica_divergence"].follows == "gradients_not_reduced"
    assert any("memory or a GPU" in one.text for one in first.arguments_for)


def test_gradients_that_differed_on_one_step_alone_are_not_called_unreduced():
    apart = {"gradients": Comparison(agree=False, minority_ranks=(1,))}
    steps = reducing(calm(60), (60, EQUAL))
    steps[40] = replace(steps[40], replicas=apart)
    assert next(iter(findings_of(steps))) == "replica_divergence"
    assert "gradients_not_reduced" not in findings_of(steps)


def test_no_sync_that_is_never_left_is_found_once_it_lasts():
    def found(steps_alone):
        parts = ((40, EQUAL), (1, AVERAGED), (steps_alone - 1, ALONE))
        return findings_of(reducing(calm(40 + steps_alone), *parts))

    assert found(9) == {}
    assert (found(10)["gradients_not_reduced"].step, list(found(10))) == (
        41,
        ["gradients_not_reduced"],
    )


def test_local_sgd_is_accused_of_nothing():
    period = ((1, AVERAGED), (15, ALONE))
    assert findings_of(reducing(calm(80), *(period * 5))) == {}
    # The record begins in the middle of a run whose period is longer than it.
    assert findings_of(reducing(calm(30, first=500), (30, ALONE))) == {}


def test_an_optimizer_without_gradients_names_the_tensors_that_have_some():
    steps = [merged_step(n, loss=2.0 + (n % 5) / 100) for n in range(1, 200)]
    schema = replace(make_schema(), facts=((UNHELD, "a.weight"),))
    log = make_log(segments=(Segment(schema=schema),))
    first = next(iter(findings_of(steps, ranks=[log]).values()))
    assert (first.cause.name, first.step) == ("optimizer_without_gradients", 1)
    assert any("that have gradients: a.weight" in one.text for one in first.arguments_for)
    assert "create the optimizer after" in remedies_for(first.cause)[0].remedies[0]


@pytest.mark.parametrize(
    ("severity", "expected"),
    [
        ("warning", {"optimizer_without_gradients"}),
        ("info", {"optimizer_without_gradients", "parameters_without_optimizer"}),
    ],
)
def test_parameters_of_no_optimizer_are_a_fault_of_their_own_if_others_are_trained(
    severity, expected
):
    conditions = [
        make_condition(name="MpAgentLayersWithoutGradient", severity=severity, since_step=40),
        make_condition(name="MpAgentParametersWithoutOptimizer", severity="warning", since_step=20),
    ]
    assert findings_of(calm(60), conditions=conditions).keys() == expected


def skipped(sequence: int, scale: float, *ranks: int, of: int = 2, **values: float) -> MergedStep:
    """Return a step that a scaler skipped, for the own gradients of some ranks."""
    step = overflow(sequence, scale)
    gradients = {**step.gradients, "inf_elements": 0.0, "nan_elements": 3.0, **values}
    return replace(
        step,
        families={"gradients": gradients},
        world_size=of,
        present_ranks=frozenset(range(of)),
        nonfinite_gradient_ranks=ranks,
    )


def test_nan_of_the_same_rank_on_skipped_steps_names_it_and_leaves_the_learning_rate():
    storm = [skipped(61 + n, 2.0 ** (16 - n), 1) for n in range(30)]
    found = findings_of([*calm(60, loss_scale=65536.0, skipped=0.0), *storm])
    first = next(iter(found.values()))
    assert (first.cause.name, first.step, first.rank) == ("nonfinite_backward_one_rank", 61, "1")
    assert found["loss_scale_collapse"].follows == "nonfinite_backward_one_rank"
    advised = " ".join(text for one in remedies_for(first.cause) for text in one.remedies)
    assert "batch" in advised and "learning rate" not in advised


@pytest.mark.parametrize(
    "storm",
    [
        [skipped(61 + n, 2.0 ** (16 - n), 0, 1) for n in range(30)],  # all ranks
        [skipped(61 + n, 2.0 ** (16 - n), 1, nan_elements=0.0, inf_elements=3.0) for n in range(9)],
        [skipped(61 + n, 2.0 ** (16 - n), n % 2) for n in range(9)],  # by turns
        [skipped(61, 65536.0, 1), skipped(62, 32768.0, 1)],  # over before the third
    ],
)
def test_overflows_name_no_rank(storm):
    found = findings_of([*calm(60, loss_scale=65536.0, skipped=0.0), *storm])
    assert "nonfinite_backward_one_rank" not in found


def rank_logs(values: Mapping[int, float], step: int, *, column: str) -> list[RankLog]:
    """Return two ranks whose column is 1 on all steps, and as given by rank on one step."""
    columns = step_columns(guarded=False, local_gradients=True)
    schema = replace(make_schema(), step_columns=columns)
    place = columns.index(column)

    def record(rank: int, sequence: int):
        row = np.full(len(columns), np.nan)
        row[place] = values[rank] if sequence == step else 1.0 + sequence % 3 / 10
        return replace(make_record(sequence), values=row)

    return [
        make_log(
            rank,
            world_size=2,
            segments=(Segment(schema=schema, steps=tuple(record(rank, n) for n in range(1, 80))),),
        )
        for rank in values
    ]


EXPLODES = [
    *calm(60, learning_rate=1e-3),
    *(
        merged_step(61 + n, norm=5e3 * 4.0**n, loss=2.0 + 30.0 * n, learning_rate=1e-3)
        for n in range(9)
    ),
]


def test_an_explosion_that_one_ranks_own_gradients_began_is_not_the_learning_rates():
    ranks = rank_logs({0: 1.2, 1: 1e5}, 61, column=LOCAL_GRAD_NORM)
    found = findings_of(EXPLODES, ranks=ranks)
    first = next(iter(found.values()))
    assert (first.cause.name, first.step, first.rank) == ("one_rank_off", 61, "1")
    assert found["gradient_explosion"].follows == "one_rank_off"


@pytest.mark.parametrize("values", [{0: 1e5, 1: 2e5}, {0: 1.2, 1: 1.3}])
def test_an_explosion_on_all_ranks_or_of_none_names_no_rank(values):
    found = findings_of(EXPLODES, ranks=rank_logs(values, 61, column=LOCAL_GRAD_NORM))
    assert next(iter(found)) == "gradient_explosion"
    assert "one_rank_off" not in found


def test_a_rank_that_is_off_without_an_explosion_is_accused_of_nothing():
    ranks = rank_logs({0: 1.2, 1: 1e5}, 30, column=LOCAL_GRAD_NORM)
    assert findings_of(calm(60), ranks=ranks) == {}


def test_remedies_go_back_to_a_step_only_where_there_is_one_before():
    active = make_condition(name="MpAgentNonFiniteUpdate", since_step=1)
    cause = findings_of(calm(3), conditions=[active])["nonfinite_update"].cause

    def advised(since_step):
        found = remedies_for(cause, lambda _: (), since_step=since_step)
        return [text for one in found for text in one.remedies]

    later, at_once = advised(2), advised(1)
    assert "from before the step" in later[0] and at_once[0].startswith("Start again")
    assert at_once[1:] == later[1:]
