"""What a node agent exports of healthy ranks within `rank_series`."""

from pathlib import Path
from typing import Any

import pytest

from mp_agent.alerting.values import values_in_force
from mp_agent.catalog.metric import Snapshot
from mp_agent.catalog.thresholds import resolve
from mp_agent.node.conditions.tracker import ConditionTracker
from mp_agent.node.series.snapshot_builder import RunExport, SnapshotBuilder
from mp_agent.records.conditions import ActiveCondition, ConditionMemory, StoredConditionEvent
from mp_agent.records.health import Laggard, OddRank, Straggler
from mp_agent.records.steps import EndReason
from mp_agent.records.views import RankView
from mp_agent.ring.run_files import ConditionNews, encode_news
from tests.agent.node.builders import make_export, make_identity, make_run_view, make_state
from tests.subtests import each

RANKS = 8


def rank(number: int, *, step: int = 100, **more: Any) -> RankView:
    values = {"compute_seconds": 1.0, "loss": 2.0, **more.pop("values", {})}
    state = more.pop("state", make_state())
    up = more.pop("up", True)
    return RankView(
        identity=make_identity(number), facts={}, state=state, up=up, step=step, values=values
    )


def export(*changed: RankView, **more: Any) -> RunExport:
    own = {view.identity.rank: view for view in changed}
    ranks = [own.get(number) or rank(number) for number in range(RANKS)]
    return make_export(ranks=ranks, **{"view": None, **more})


def of(snapshot: Snapshot, name: str) -> dict[str, float]:
    """Return the values of a metric by their last label of the scope."""
    (family,) = (family for family in snapshot if family.metric.prometheus_name == name)
    return {sample.labels[1]: sample.value for sample in family.samples}  # type: ignore[misc]


def rank_samples(snapshot: Snapshot) -> list[str]:
    """Return the rank of every series but `mp_agent_rank_up`."""
    return [
        sample.labels[1]
        for family in snapshot
        if family.metric.label_names[:2] == ("run", "rank")
        and family.metric.scope.name == "RANK"
        and family.metric.prometheus_name != "mp_agent_rank_up"
        for sample in family.samples
    ]


def build(exported: RunExport, rank_series: int | None) -> Snapshot:
    return SnapshotBuilder(resolve({}), 20_000, rank_series).build([exported], 0.0)


EACH = len(rank_samples(build(export(), None))) // RANKS


def test_without_a_limit_all_ranks_are_exported_and_nothing_is_counted():
    snapshot = build(export(), None)

    assert len(of(snapshot, "mp_agent_rank_step")) == RANKS
    assert of(snapshot, "mp_agent_rank_series_left_out") == {}


@each("room", [0, 1, EACH - 1, EACH, 3 * EACH, 3 * EACH + 1, RANKS * EACH])
def test_healthy_ranks_have_at_most_so_many_series_and_the_rest_is_counted(room):
    snapshot = build(export(), room)

    assert len(rank_samples(snapshot)) == room // EACH * EACH
    assert sum(of(snapshot, "mp_agent_rank_series_left_out").values()) == (
        RANKS * EACH - len(rank_samples(snapshot))
    )
    assert len(of(snapshot, "mp_agent_rank_up")) == RANKS


@pytest.mark.parametrize(
    "dead", [rank(5, up=False), rank(5, up=False, state=make_state(end_reason=EndReason.FAILED))]
)
def test_a_rank_that_died_keeps_its_series(dead):
    assert set(of(build(export(dead), 0), "mp_agent_rank_step")) == {"5"}


def test_a_rank_that_has_completed_is_healthy():
    done = rank(5, up=False, state=make_state(end_reason=EndReason.COMPLETED))

    assert of(build(export(done), 0), "mp_agent_rank_step") == {}


def test_a_rank_whose_last_loss_was_not_finite_keeps_its_series():
    assert set(
        of(build(export(rank(3, values={"loss_nonfinite": 1.0})), 0), "mp_agent_rank_step")
    ) == {"3"}


def test_ranks_that_metrics_of_the_run_name_keep_their_series():
    odd = OddRank(rank=4, loss=9.0, usual=2.0, highest=2.5, steps=3)
    view = make_run_view(
        laggards=(Laggard(rank=1, phase="forward"),),
        straggler=Straggler(rank=2, slowdown=2.0, delay_seconds=1.0),
        loss_outliers=odd,
    )

    assert set(of(build(export(view=view), 0), "mp_agent_rank_step")) == {"1", "2", "4"}


def test_ranks_that_conditions_name_keep_their_series():
    assert set(of(build(export(named_ranks=frozenset({6, 70})), 0), "mp_agent_rank_step")) == {"6"}


def event(state: str, name: str, number: str) -> StoredConditionEvent:
    condition = ActiveCondition(
        name=name,
        severity="warning",
        run="llama",
        since_step=1,
        since_unix_seconds=0.0,
        value=1.0,
        summary="",
        description="",
        remedy="",
        rank=number,
    )
    return StoredConditionEvent(state=state, condition=condition, step=1, time_unix_seconds=0.0)


def test_every_node_knows_the_ranks_that_the_roots_conditions_name(tmp_path: Path):
    tracker = ConditionTracker(tmp_path, values_in_force(), memory=ConditionMemory())
    news = ConditionNews(epoch="root")
    for one in (
        event("firing", "MpAgentRankStalled", "12"),
        event("firing", "MpAgentRankStraggler", "7"),
        event("firing", "MpAgentLossSpike", ""),
        event("resolved", "MpAgentRankStalled", "12"),
    ):
        news = news.with_event(one)
    assert tracker.named_ranks == frozenset()

    tracker.adopt_from_root(encode_news(news))

    assert tracker.named_ranks == {7}


class TestWorstFirst:
    def test_the_one_furthest_behind_comes_first(self):
        slow = rank(2, values={"compute_seconds": 9.0})
        snapshot = build(export(rank(6, step=90), slow), EACH)

        assert set(of(snapshot, "mp_agent_rank_step")) == {"6"}

    def test_a_lag_of_one_step_is_no_reason(self):
        slow = rank(2, values={"compute_seconds": 9.0})
        snapshot = build(export(rank(6, step=99), slow), EACH)

        assert set(of(snapshot, "mp_agent_rank_step")) == {"2"}

    def test_only_the_much_worse_takes_the_series_of_another(self):
        builder = SnapshotBuilder(resolve({}), 20_000, EACH)

        def shown(seconds: float) -> set[str]:
            slow = rank(4, values={"compute_seconds": seconds})
            return set(of(builder.build([export(slow)], 0.0), "mp_agent_rank_step"))

        assert [shown(seconds) for seconds in (1.0, 1.9, 2.1, 1.0, 0.4)] == [
            {"0"},
            {"0"},
            {"4"},
            {"4"},
            {"0"},
        ]


def test_each_run_has_a_limit_of_its_own():
    other = make_export(run="other", ranks=export().ranks, view=None)
    snapshot = SnapshotBuilder(resolve({}), 20_000, EACH).build([export(), other], 0.0)

    assert len(rank_samples(snapshot)) == 2 * EACH
