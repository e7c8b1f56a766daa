"""Tensors are found in what modules take and return, and changed without changing the rest."""

from collections import OrderedDict, namedtuple
from dataclasses import dataclass

import pytest
import torch

from mp_agent.plan.execution.errors import floating, mapped, opaque_type, tensors_of
from mp_agent.plan.execution.precision import cast

BaseModelOutput = pytest.importorskip("transformers.modeling_outputs").BaseModelOutput
Pair = namedtuple("Pair", "left right")


@dataclass(frozen=True)
class Outputs:
    logits: torch.Tensor
    name: str = "x"


def test_tensors_are_found_by_path_in_every_container():
    one = torch.ones(2)
    value = {
        "a": (one, [one]),
        "b": Pair(one, None),
        "c": Outputs(one),
        "d": BaseModelOutput(last_hidden_state=one),
        "e": torch.ones(1, dtype=torch.int64),
    }
    paths = [path for path, _ in tensors_of(value)]
    assert paths == [".a.0", ".a.1.0", ".b.0", ".c.logits", ".d.last_hidden_state", ".e"]
    assert ".e" not in floating(value)


def test_containers_keep_their_types_and_the_original_its_tensors():
    one = torch.ones(2)
    for value in (
        (one, "x"),
        [one],
        Pair(one, one),
        OrderedDict(a=one),
        Outputs(one, "y"),
        BaseModelOutput(last_hidden_state=one),
    ):
        made = mapped(value, lambda tensor: tensor + 1)
        assert type(made) is type(value)
        assert all(bool((tensor == 2).all()) for _, tensor in tensors_of(made))
        assert all(tensor is one for _, tensor in tensors_of(value))
    assert mapped(Outputs(one, "y"), torch.neg).name == "y"
    assert mapped(BaseModelOutput(last_hidden_state=one), torch.neg)["last_hidden_state"][0] == -1


class Graph:
    """As torch_geometric's: it changes its tensors in place, a copy those of its own."""

    def __init__(self, **tensors):
        self.tensors = tensors

    def __copy__(self):
        return Graph(**self.tensors)

    def to(self, device):
        return self.apply(lambda one: one.to(device))

    def to_dict(self):
        return dict(self.tensors)

    def apply(self, change):
        self.tensors = {name: change(one) for name, one in self.tensors.items()}
        return self


def test_what_maps_its_tensors_itself_is_a_container():
    graph = Graph(x=torch.ones(3), edges=torch.ones(2, 4, dtype=torch.int64))
    assert [path for path, _ in tensors_of((graph,))] == [".0.x", ".0.edges"]
    made = cast((graph,), torch.float64)[0]
    assert (made.tensors["x"].dtype, made.tensors["edges"].dtype) == (torch.float64, torch.int64)
    assert graph.tensors["x"].dtype is torch.float32
    assert opaque_type(graph) == ""


def test_complex_numbers_stay_complex_in_every_precision():
    value = torch.ones(2, dtype=torch.complex64) * 1j
    for dtype, expected in (
        (torch.float64, torch.complex128),
        (torch.float32, torch.complex64),
        (torch.bfloat16, torch.complex64),
    ):
        assert cast(value, dtype).dtype is expected
    assert cast(value, torch.float64).tolist() == [1j, 1j]


def test_what_may_change_while_it_is_used_is_named():
    class Cache:
        pass

    assert opaque_type((torch.ones(1), {"a": [1, None, "x", torch.float16]})) == ""
    assert opaque_type({"a": (Cache(),)}) == "Cache"
