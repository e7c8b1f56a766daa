"""Too many layers for the series that may be exported."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mp_agent.catalog.metrics import BY_PROMETHEUS_NAME
from mp_agent.node.accounting.accumulator import CounterStore
from mp_agent.node.series.layer_budget import LayerBudget, depth_that_fits, rollup_label, union
from mp_agent.records.views import LayerView
from tests.agent.node.builders import NO_GRADIENTS

COUNTER = BY_PROMETHEUS_NAME["mp_agent_layer_grad_nonfinite_elements_total"]


def layer(name: str, norm: float = 1.0, *, judged: bool = True, **columns: float) -> LayerView:
    values = {**NO_GRADIENTS, "sum_squares": norm**2, "abs_max": norm, "elements": 4.0, **columns}
    return LayerView(name=name, values=values, judged=judged)


class Counts:
    """Counters of layers that a test adds to."""

    def __init__(self) -> None:
        self.of: dict[str, float] = {}

    def add(self, name: str, count: float) -> None:
        self.of[name] = self.of.get(name, 0.0) + count

    @property
    def schema_index(self) -> CounterStore:
        return CounterStore([(COUNTER.name, (name,), count) for name, count in self.of.items()])


def govern(layer_budget: LayerBudget, layers: list[LayerView], counts: Counts, room: int):
    """Return what is shown: name → (norm, counter)."""
    views, counters = layer_budget.govern(layers, counts.schema_index, [COUNTER], room)
    assert len(views) <= room
    assert len({view.name for view in views}) == len(views)
    return {
        view.name: (
            math.sqrt(view.values["sum_squares"]),
            counters.total(COUNTER, (view.name,)),
        )
        for view in views
    }


@pytest.mark.parametrize(
    ("name", "depth", "label"),
    [
        ("layers.0.attn.q.weight", 9, "layers.0.attn.q.*"),
        ("layers.0.attn.q.weight", 2, "layers.0.*"),
        ("layers.0.attn.q.weight@4-7", 2, "layers.0.*@4-7"),
        ("layers.0.attn.q.weight@4-7", 0, "*"),
        ("weight", 3, "*"),
    ],
)
def test_a_layer_is_rolled_up_into_its_parent(name, depth, label):
    assert rollup_label(name, depth) == label


def test_the_depth_is_as_great_as_fits():
    names = [f"layers.{i}.{part}.weight" for i in range(10) for part in ("attn", "mlp")]

    assert [depth_that_fits(names, n) for n in (20, 19, 10, 9, 1)] == [3, 2, 2, 1, 1]


def test_a_roll_up_is_the_union_of_its_children():
    children = [layer("a", 3.0, zero_elements=1.0), layer("b", 4.0, zero_elements=3.0)]
    view = union("m.*", children)

    assert (view.name, view.judged) == ("m.*", True)
    assert math.sqrt(view.values["sum_squares"]) == 5.0
    assert view.values["abs_max"] == 4.0
    assert view.values["zero_elements"] / view.values["elements"] == 0.5


def test_children_whose_norms_do_not_count_are_left_out_of_the_norm():
    view = union("m.*", [layer("a", 3.0), layer("b", 1e9, judged=False)])
    assert math.sqrt(view.values["sum_squares"]) == 3.0
    assert not union("m.*", [layer("b", judged=False)]).judged


def test_with_room_for_all_every_layer_has_its_own_series():
    counts = Counts()
    counts.add("m.a", 3)

    assert govern(LayerBudget(), [layer("m.a"), layer("m.b")], counts, 2) == {
        "m.a": (1.0, 3.0),
        "m.b": (1.0, 0.0),
    }


def test_a_roll_up_stands_for_exactly_the_children_that_are_not_shown():
    layers = [layer(f"m{i % 2}.l{i}", norm=float(i)) for i in range(1, 9)]
    shown = govern(LayerBudget(), layers, Counts(), 6)

    assert list(shown) == ["m1.l5", "m0.l6", "m1.l7", "m0.l8", "m1.*", "m0.*"]
    assert shown["m1.*"][0] == pytest.approx(math.hypot(1, 3))
    assert shown["m0.*"][0] == pytest.approx(math.hypot(2, 4))


def test_layers_that_had_nonfinite_elements_come_before_large_ones():
    counts = Counts()
    counts.add("m.l1", 5)
    shown = govern(LayerBudget(), [layer(f"m.l{i}", float(i)) for i in range(5)], counts, 3)

    assert list(shown) == ["m.l1", "m.l4", "m.*"]
    assert shown["m.l1"][1] == 5.0


def test_without_room_nothing_is_shown():
    assert govern(LayerBudget(), [layer("m.a"), layer("m.b")], Counts(), 0) == {}
    assert list(govern(LayerBudget(), [layer("m.a"), layer("m.b")], Counts(), 1)) == ["m.*"]


def test_norms_that_change_places_do_not_change_the_series():
    layer_budget = LayerBudget()
    first = govern(layer_budget, [layer(f"m.l{i}", 1.0 + i / 10) for i in range(10)], Counts(), 5)
    again = govern(layer_budget, [layer(f"m.l{i}", 2.0 - i / 10) for i in range(10)], Counts(), 5)

    assert list(again) == list(first)


def test_a_layer_that_is_much_worse_takes_the_series_of_the_least_bad():
    layer_budget = LayerBudget()
    layers = [layer(f"m.l{i}", 1.0 + i / 10) for i in range(10)]
    assert list(govern(layer_budget, layers, Counts(), 3)) == ["m.l8", "m.l9", "m.*"]

    layers[0] = layer("m.l0", 100.0)
    assert list(govern(layer_budget, layers, Counts(), 3)) == ["m.l0", "m.l9", "m.*"]


def test_a_little_more_or_less_room_changes_nothing():
    layer_budget = LayerBudget()
    layers = [layer(f"m.l{i}", float(i)) for i in range(200)]
    first = govern(layer_budget, layers, Counts(), 100)
    assert len(first) == 95

    assert list(govern(layer_budget, layers, Counts(), 96)) == list(first)
    assert list(govern(layer_budget, layers, Counts(), 110)) == list(first)
    assert len(govern(layer_budget, layers, Counts(), 80)) == 76


def test_a_layer_that_goes_bad_is_shown_by_itself_from_its_first_bad_element():
    layer_budget, counts = LayerBudget(), Counts()
    layers = [layer(f"m.l{i}", float(i)) for i in range(5)]
    assert "m.l0" not in govern(layer_budget, layers, counts, 3)

    counts.add("m.l0", 7)
    shown = govern(layer_budget, layers, counts, 3)
    assert shown["m.l0"][1] == 7.0
    assert shown["m.*"][1] == 0.0, "an event is shown once"


def test_layers_that_become_too_many_keep_what_was_shown_of_them_out_of_the_roll_up():
    layer_budget, counts = LayerBudget(), Counts()
    counts.add("m.l1", 3)
    counts.add("m.l2", 4)
    govern(layer_budget, [layer(f"m.l{i}") for i in range(3)], counts, 3)
    shown = govern(layer_budget, [layer(f"m.l{i}") for i in range(9)], counts, 3)

    assert shown["m.*"][1] == 0.0
    counts.add("m.l8", 2)
    counts.add("m.l7", 1)
    assert sum(count for _, count in govern(layer_budget, layers_of(9), counts, 2).values()) >= 3.0


def layers_of(count: int) -> list[LayerView]:
    return [layer(f"m.l{i}") for i in range(count)]


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_no_counter_falls_and_every_event_is_shown_once(data):
    """Whatever goes bad, whenever it is scraped, and when the agent restarts in between."""
    layer_budget, counts = LayerBudget(), Counts()
    norms = {f"m{i % 3}.l{i}": 1.0 for i in range(12)}
    before: dict[str, float] = {}
    high: dict[str, float] = {}
    for _ in range(data.draw(st.integers(1, 15))):
        name = data.draw(st.sampled_from(sorted(norms)))
        match data.draw(st.sampled_from(["count", "norm", "restart", "room"])):
            case "count":
                counts.add(name, data.draw(st.integers(1, 9)))
            case "norm":
                norms[name] = data.draw(st.sampled_from([0.1, 1.0, 10.0, 1e3]))
            case "restart":
                layer_budget = LayerBudget(layer_budget.state)
        room = data.draw(st.sampled_from([6, 7, 7, 7, 9]))
        layers = [layer(name, norm) for name, norm in norms.items()]
        found = govern(layer_budget, layers, counts, room)
        after = {name: count for name, (_, count) in found.items()}
        for name in before.keys() & after.keys():
            assert after[name] >= before[name]
        for name, count in after.items():
            assert count >= high.get(name, 0.0), "nor does one that was away for a while"
            high[name] = count
        assert math.hypot(*(norm for norm, _ in found.values())) == pytest.approx(
            math.hypot(*norms.values())
        )
        before = after
    assert sum(high.values()) == sum(counts.of.values())
