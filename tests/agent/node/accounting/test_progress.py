from dataclasses import dataclass, field

from pydantic import TypeAdapter

from mp_agent.catalog.thresholds import resolve
from mp_agent.node.accounting.accumulator import Accumulator, CounterStore
from mp_agent.node.accounting.progress import Progress
from mp_agent.node.accounting.tracker import AccountContext, Tracker
from mp_agent.records.merged import MergedStep
from mp_agent.records.views import LayerView
from tests.agent.node.builders import make_run_view, merged_step


def test_what_each_tracker_shows_is_in_the_view(monkeypatch):
    shown = [type(own) for own in Progress().trackers if hasattr(own, "view")]
    asked = []
    for tracker in shown:
        monkeypatch.setattr(tracker, "view", lambda own, *_: asked.append(type(own)))
    new_account(Progress()).view(make_run_view(), 0.0)

    assert len(shown) > 10
    assert sorted(asked, key=str) == sorted(shown, key=str)


@dataclass(slots=True, kw_only=True)
class HighestLoss(Tracker):
    """What a new metric would remember."""

    highest: float | None = None

    def observe(self, step: MergedStep, context: AccountContext) -> None:
        self.highest = max(step.get("loss") or 0.0, self.highest or 0.0)


def new_account(progress: Progress) -> Accumulator:
    return Accumulator(
        resolve({}), progress=progress, counters=CounterStore(), window_seconds=120.0
    )


def judged_layer() -> LayerView:
    columns = ("sum_squares", "abs_max", "zero_elements", "elements")
    return LayerView(name="w", values=dict.fromkeys(columns, 64.0), judged=True)


@dataclass(slots=True, kw_only=True)
class More(Progress):
    highest: HighestLoss = field(default_factory=HighestLoss)


def test_a_tracker_that_is_declared_is_observed_and_stored():
    progress = More()
    first = new_account(progress)
    for sequence, loss in enumerate((2.0, 7.0, 3.0), 1):
        first.fold_step(merged_step(sequence, loss=loss))
    assert progress.highest.highest == 7.0

    adapter = TypeAdapter(More)
    progress = adapter.validate_json(adapter.dump_json(progress))
    successor = new_account(progress)
    successor.fold_step(merged_step(4, loss=5.0))
    assert progress.highest.highest == 7.0
    assert successor.view(make_run_view(), 0.0).latest.loss == 5.0

    assert not successor.progress.layers.memory.names
    successor.progress.layers.fold([judged_layer()], resolve({}))
    third = adapter.validate_json(adapter.dump_json(progress))
    third.layers.fold([judged_layer()], resolve({}))
    assert third.layers.memory.names == ["w"], "what is not stored was made again"

    successor.begin_attempt()
    assert isinstance(successor.progress, More)
    assert successor.progress.highest.highest is None
