"""The hooks on DeepSpeed's engine: put on its class when that is made, and taken away again."""

import sys
from types import ModuleType
from typing import Any, Generic, TypeVar

import pytest
from torch import nn

from mp_agent.probe.hooks import deepspeed
from mp_agent.probe.hooks.patches import Patches
from mp_agent.probe.isolation import Shield

T = TypeVar("T")

HOOKED = ("__init__", "backward", "scale", "_backward_prologue", "_take_model_step")


def make_engine_class(module: str = "deepspeed.runtime.engine") -> type:
    def method(self, *args):
        return args

    body: dict[str, Any] = {name: method for name in HOOKED if name != "__init__"}
    body["__init__"] = lambda self: nn.Module.__init__(self)
    return type("DeepSpeedEngine", (nn.Module,), {**body, "__module__": module})


@pytest.fixture
def patches():
    patches = Patches()
    yield patches
    patches.restore()


@pytest.fixture
def events():
    class Events:
        def __getattr__(self, name):
            return lambda *args: None

    return Events()


@pytest.fixture
def shield():
    return Shield(on_failure=lambda: pytest.fail("the probe failed"))


def test_nothing_is_imported_and_modules_are_as_before(patches, events, shield):
    before = "__init_subclass__" in vars(nn.Module)
    deepspeed.install(patches, events, shield)

    class Tagged(nn.Module):
        tag: str

        def __init_subclass__(cls, tag="", **kwargs):
            super().__init_subclass__(**kwargs)
            cls.tag = tag

    class Mixed(Tagged, Generic[T], tag="any"):
        pass

    assert Mixed[int] is not Mixed
    assert Mixed.tag == "any"
    assert "deepspeed" not in sys.modules
    patches.restore()
    assert ("__init_subclass__" in vars(nn.Module)) == before


@pytest.mark.parametrize("imported_first", [True, False])
def test_the_class_is_hooked_whenever_it_is_imported(
    patches, events, shield, imported_first, monkeypatch
):
    module: Any = ModuleType("deepspeed.runtime.engine")
    if imported_first:
        module.DeepSpeedEngine = make_engine_class()
        monkeypatch.setitem(sys.modules, "deepspeed.runtime.engine", module)
        own = dict(vars(module.DeepSpeedEngine))
        deepspeed.install(patches, events, shield)
        engine = module.DeepSpeedEngine
        assert all(vars(engine)[name] is not own[name] for name in HOOKED)
        patches.restore()
        assert all(vars(engine)[name] is own[name] for name in HOOKED)
    else:
        deepspeed.install(patches, events, shield)
        engine = make_engine_class()
        assert all(hasattr(vars(engine)[name], "__wrapped__") for name in HOOKED)
        patches.restore()
        assert not any(hasattr(vars(engine)[name], "__wrapped__") for name in HOOKED)


def test_other_classes_of_that_name_are_left_alone(patches, events, shield):
    deepspeed.install(patches, events, shield)
    other = make_engine_class(module="somewhere.else")
    assert not any(hasattr(vars(other)[name], "__wrapped__") for name in HOOKED)


def test_a_later_version_without_a_method_is_hooked_where_it_can_be(patches, events, shield):
    deepspeed.install(patches, events, shield)
    body = {"__module__": "deepspeed.runtime.engine", "_take_model_step": lambda self: 7}
    engine = type("DeepSpeedEngine", (nn.Module,), body)
    assert engine()._take_model_step() == 7
