"""The search finds the smallest sets, says when it could not, and never returns what fails."""

import random

import pytest

from mp_agent.plan.comparison.search import find_kept, outermost

ALL = frozenset({"", "(loss)"})
NAMES = [f"layer{index}" for index in range(20)]


def needing(*needed):
    """Return a predicate: each needed module is kept, itself or within another."""

    def passes(kept):
        return all(
            any(one == other or one.startswith(f"{other}.") or other == "" for other in kept)
            for one in needed
        )

    return passes


@pytest.mark.parametrize(
    "needed", [["layer0"], ["layer19"], ["layer3", "layer11"], ["layer1", "layer2", "layer18"]]
)
def test_exactly_what_is_needed_is_found(needed):
    found = find_kept(NAMES, needing(*needed), 200, ALL)
    assert found.passes and found.minimal
    assert found.kept == tuple(sorted(needed))
    assert found.trials <= 80


def test_random_sets_are_found_exactly():
    generator = random.Random(5)
    for _ in range(50):
        needed = generator.sample(NAMES, generator.randint(1, 6))
        ranked = generator.sample(NAMES, len(NAMES))
        found = find_kept(ranked, needing(*needed), 1000, ALL)
        assert found.kept == tuple(sorted(needed))


def test_a_module_within_another_is_preferred_to_it():
    ranked = ["block", "block.norm", "block.up", "head"]
    found = find_kept(ranked, needing("block.norm"), 100, ALL)
    assert found.kept == ("block.norm",)
    assert find_kept(ranked[:1] + ranked[3:], needing("block.norm"), 100, ALL).kept == ("block",)


def test_a_result_has_passed_even_where_passing_is_not_monotone():
    def passes(kept):
        return "layer4" in kept and ("layer7" not in kept or "layer9" in kept)

    found = find_kept(NAMES, passes, 500, ALL)
    assert found.passes and passes(frozenset(found.kept))


def test_everything_is_the_last_resort():
    found = find_kept(NAMES, lambda kept: "" in kept, 100, ALL)
    assert found.passes and found.kept == ("", "(loss)")


def test_where_nothing_passes_nothing_is_returned():
    found = find_kept(NAMES, lambda kept: False, 100, ALL)
    assert not found.passes and found.kept == () and not found.minimal


def test_when_trials_run_out_the_smallest_set_that_passed_is_not_called_minimal():
    passes = needing("layer3", "layer11", "layer17")
    found = find_kept(NAMES, passes, 8, ALL)
    assert found.trials == 8 and found.passes and not found.minimal
    assert passes(frozenset(found.kept))
    assert not find_kept(NAMES, passes, 1, ALL).passes


def test_no_module_at_all():
    assert find_kept([], lambda kept: False, 10, ALL).kept == ()
    assert find_kept([], lambda kept: bool(kept), 10, ALL).kept == ("", "(loss)")


def test_modules_within_kept_ones_are_redundant():
    assert outermost(["a", "a.b", "a.b.c", "ab", "(loss)"]) == ("(loss)", "a", "ab")
    assert outermost(["", "a", "(loss)"]) == ("", "(loss)")
