from collections.abc import Mapping
from dataclasses import dataclass, field, fields, make_dataclass
from typing import Any

import pytest
from pydantic import TypeAdapter

from mp_agent.catalog.thresholds import resolve
from mp_agent.node.accounting.accumulator import Accumulator, CounterStore
from mp_agent.node.accounting.progress import Progress
from mp_agent.node.accounting.tracker import AccountContext, Tracker
from mp_agent.records.health import Health
from mp_agent.records.merged import MergedStep, StepTransition
from mp_agent.records.views import LayerView, RunView
from tests.agent.node.builders import merged_step

CONTEXT = AccountContext(resolve({}), 120.0, Progress())

READERS = {
    "view": (RunView, lambda tracker: tracker.view(CONTEXT, 0.0)),
    "health": (Health, lambda tracker: tracker.health(CONTEXT)),
    "transition": (StepTransition, lambda tracker: tracker.transition()),
}


@pytest.mark.parametrize("reader", READERS)
def test_each_field_comes_from_one_tracker(reader):
    record, read = READERS[reader]
    found = [name for tracker in Progress().trackers for name in read(tracker)]

    assert len(found) == len(set(found))
    assert set(found) <= {declared.name for declared in fields(record)}


def test_all_that_counters_and_health_know_comes_from_trackers():
    given = {"step", "previous", "thresholds"}
    transition = {name for own in Progress().trackers for name in own.transition()}
    assert transition == {declared.name for declared in fields(StepTransition)} - given

    health = {name for own in Progress().trackers for name in own.health(CONTEXT)}
    assert health == {declared.name for declared in fields(Health)} - {"laggards"}


@dataclass(slots=True, kw_only=True)
class HighestLoss(Tracker):
    """What a new metric would remember."""

    highest: float | None = None

    def observe(self, step: MergedStep, context: AccountContext) -> None:
        self.highest = max(step.get("loss") or 0.0, self.highest or 0.0)

    def view(self, context: AccountContext, time_unix_seconds: float) -> Mapping[str, Any]:
        return {"highest_loss": self.highest}


def judged_layer() -> LayerView:
    columns = ("sum_squares", "abs_max", "zero_elements", "elements")
    return LayerView(name="w", values=dict.fromkeys(columns, 64.0), judged=True)


def test_a_tracker_that_is_declared_is_observed_stored_and_shown():
    """One more line in `Progress` is all that it takes."""
    more = make_dataclass(
        "More",
        [("highest", HighestLoss, field(default_factory=HighestLoss))],
        bases=(Progress,),
        kw_only=True,
    )

    def account(progress: Progress) -> Accumulator:
        return Accumulator(
            resolve({}), progress=progress, counters=CounterStore(), window_seconds=120.0
        )

    first = account(more())
    for sequence, loss in enumerate((2.0, 7.0, 3.0), 1):
        first.fold_step(merged_step(sequence, loss=loss))
    assert first.view(0.0)["highest_loss"] == 7.0

    adapter: TypeAdapter[Progress] = TypeAdapter(more)
    successor = account(adapter.validate_json(adapter.dump_json(first.progress)))
    successor.fold_step(merged_step(4, loss=5.0))
    assert successor.view(0.0)["highest_loss"] == 7.0
    assert successor.view(0.0)["loss"] == 5.0

    assert not successor.progress.layers.memory.names
    successor.progress.layers.fold([judged_layer()], resolve({}))
    third = adapter.validate_json(adapter.dump_json(successor.progress))
    third.layers.fold([judged_layer()], resolve({}))
    assert third.layers.memory.names == ["w"], "what is not stored was made anew"

    successor.begin_attempt()
    assert successor.view(0.0)["highest_loss"] is None
