"""Modules are found among the live objects, which are neither asked nor kept alive."""

import gc
import weakref

import pytest
from torch import nn

from mp_agent.probe.optimizers import live_objects
from tests.agent.probe.optimizers.small_trees import Block, Model


@pytest.fixture(autouse=True, scope="module")
def only_new_objects_are_walked() -> None:
    """Here the walk is what is tested: it stays as it is."""


def test_the_walk_passes_by_half_made_modules_and_hostile_objects():
    class Hostile:
        def __getattribute__(self, name):
            raise RuntimeError(name)

    unfinished = nn.Linear.__new__(nn.Linear)
    hostile = [Hostile()]
    live = live_objects.walk()
    assert not any(module is unfinished for module in live.modules)
    del hostile


@pytest.mark.parametrize("young", [False, True])
def test_the_walk_keeps_nothing_alive(young):
    gc.disable()
    try:
        gone = nn.Linear(2, 2)
        kept = weakref.ref(gone)
        live = live_objects.walk(young=young)
        assert any(each is gone for each in live.modules)
        del live, gone
        assert kept() is None
    finally:
        gc.enable()


@pytest.mark.slow
def test_the_walk_finds_what_was_frozen_and_leaves_it_frozen():
    gc.collect()
    model = Model()
    gone = nn.Linear(2, 2)
    kept = weakref.ref(gone)
    gc.freeze()
    try:
        later = Block()
        live = live_objects.walk()
        found = list(map(id, live.modules))
        assert len(found) == len(set(found))
        assert {id(each) for each in (*model.modules(), *later.modules())} <= set(found)
        # The collector names what is not frozen; frozen objects may cease to exist meanwhile.
        assert not any(each is model for each in gc.get_objects())
        del live, gone
        assert kept() is None
    finally:
        gc.unfreeze()
