"""Shares: who holds what, the same on all ranks. Wrapped ones are tested in real jobs too."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from mp_agent.probe.placement import Survey, declarations
from mp_agent.probe.placement.axes import Grid, PlacementAxis, Spread, axes_by_parameter
from mp_agent.probe.placement.survey import PARTIAL
from mp_agent.probe.processes.launchers import describe_ranks
from mp_agent.records.schema import Share
from tests.agent.probe.ranks import run_ranks
from tests.gloo import end_process_group


@pytest.mark.parametrize(
    ("ranks", "text"),
    [([0], "0"), ([3, 1, 2, 0], "0-3"), ([0, 2, 3, 7], "0,2-3,7"), (range(10_000), "0-9999")],
)
def test_ranks_are_described_shortly(ranks, text):
    assert describe_ranks(list(ranks)) == text


def test_scattered_ranks_get_a_short_name_of_their_own():
    even, odd = describe_ranks(range(0, 100, 2)), describe_ranks(range(1, 100, 2))
    assert even != odd
    assert len(even) == len(odd) == 16


class TestGrid:
    """Rank 5 of 2 replicas × 2 shards × …, rank = 4 · stage + 2 · replica + shard."""

    split = PlacementAxis(Spread.SPLIT, (4, 5), "tp", "1")
    copied = PlacementAxis(Spread.COPIED, (5, 7), "ddp")

    def test_of_two_axes_spans_all_their_ranks(self):
        grid = Grid(5).crossed_by(self.split).crossed_by(self.copied)
        assert grid.home == {4, 5, 6, 7}
        assert grid.share() == Share(
            group="shard(1) replicate over 2x2 of ranks 4-7",
            shard_index=1,
            shard_count=2,
            replica_index=0,
            replica_count=2,
            home="4-7",
        )

    def test_is_the_same_on_all_its_ranks(self):
        grid = Grid(6).crossed_by(PlacementAxis(Spread.SPLIT, (6, 7), "tp", "1"))
        grid = grid.crossed_by(PlacementAxis(Spread.COPIED, (4, 6), "ddp"))
        other = Grid(5).crossed_by(self.split).crossed_by(self.copied)
        assert grid.share().group == other.share().group
        assert grid.share().home == other.share().home

    def test_takes_no_second_axis_along_the_same_ranks(self):
        everybody = PlacementAxis(Spread.COPIED, tuple(range(8)), "ddp")
        grid = Grid(5).crossed_by(self.split).crossed_by(everybody)
        assert grid.axes == (self.split,)


def verdict(parameter, ranks_in_run=4, name="weight", modules=(), root=None):
    return Survey(modules, root, ranks_in_run).placement_of(name, parameter)


class TestPlainParameters:
    def test_of_a_world_of_one_are_all_there_is(self):
        assert verdict(nn.Parameter(torch.ones(1)), 1).share == Share(group="single")

    def test_among_others_are_only_assumed(self):
        found = verdict(nn.Parameter(torch.ones(1)))
        assert found.share == Share(group="unwrapped", assumed=True)
        assert found.sources == frozenset()

    @pytest.mark.parametrize("name", ["moe.experts.3.up.weight", "experts.w1", "expert_2.bias"])
    def test_called_experts_are_judged_apart(self, name):
        assert verdict(nn.Parameter(torch.ones(1)), name=name).share.group == "unwrapped experts"

    def test_called_otherwise_are_not(self):
        found = verdict(nn.Parameter(torch.ones(1)), name="expertise.weight")
        assert found.share.group == "unwrapped"


class TestMegatronAttributes:
    """Without Megatron's groups; with them, see the numerics tests."""

    def test_a_shared_copy_is_left_to_the_other_stage(self):
        parameter: Any = nn.Parameter(torch.ones(1))
        parameter.shared = True
        found = verdict(parameter)
        assert found.share is None
        assert found.unsupported == ""

    def test_an_expert_is_judged_apart(self):
        parameter: Any = nn.Parameter(torch.ones(1))
        parameter.allreduce = False
        assert verdict(parameter).share == Share(group="unwrapped experts", assumed=True)

    def test_a_shard_is_judged_apart(self):
        parameter: Any = nn.Parameter(torch.ones(1))
        parameter.tensor_model_parallel = True
        assert verdict(parameter).share == Share(group="unwrapped shards", assumed=True)

    def test_groups_that_cannot_be_had_are_done_without(self, monkeypatch):
        def refuse():
            raise AssertionError("tensor model parallel group is not initialized")

        state = SimpleNamespace(get_tensor_model_parallel_group=refuse)
        monkeypatch.setitem(sys.modules, "megatron.core.parallel_state", state)
        assert verdict(nn.Parameter(torch.ones(1))).share.assumed


def _shares_of_rank(rank: int, directory: Path) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{directory}/rendezvous", rank=rank, world_size=4
    )
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    tensor = torch.arange(8.0)
    found = {
        "hybrid": verdict(distribute_tensor(tensor, mesh, [Replicate(), Shard(0)])),
        "both": verdict(distribute_tensor(tensor, mesh, [Shard(0), Shard(0)])),
        "column": verdict(distribute_tensor(tensor, mesh["inner"], [Shard(0)])),
        "partial": verdict(DTensor.from_local(tensor, mesh["inner"], [Partial()])),
    }
    model = DistributedDataParallel(nn.Linear(1, 1), process_group=mesh.get_group("inner"))
    found["pair"] = verdict(model.module.weight, modules=[model])

    parallel = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    parallelize_module(parallel, mesh["inner"], {"0": ColwiseParallel()})
    found["split"] = verdict(parallel[0].weight, root=parallel)
    found["norm"] = verdict(parallel[1].weight, root=parallel)
    fully_shard(parallel, mesh=mesh["outer"])
    found["split on both"] = verdict(parallel[0].weight, root=parallel)
    found["norm on both"] = verdict(parallel[1].weight, root=parallel)
    copied = nn.Linear(4, 4)
    fully_shard(copied, mesh=init_device_mesh("cpu", (4, 1), mesh_dim_names=("copies", "one")))
    found["copied"] = verdict(copied.weight, modules=[copied], root=copied)

    group = dist.new_group([0, 1]), dist.new_group([2, 3])
    declared = nn.ModuleDict({name: nn.Linear(1, 1) for name in ("split", "own", "twice", "not")})
    declarations.add(declared["split"], group[rank // 2], [rank % 2, rank % 2 + 2], True)
    declarations.add(declared["own"], None, None, True)
    declarations.add(declared, None, range(4), True)
    declarations.add(declared["not"], None, None, False)
    for name, module in declared.items():
        found[f"declared {name}"] = verdict(module.weight)
    torch.save(found, directory / f"shares{rank}.pt")
    dist.barrier()
    end_process_group()


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory):
    """The verdicts of each of four ranks."""
    directory = tmp_path_factory.mktemp("shares")
    run_ranks(_shares_of_rank, directory, ranks=4)
    verdicts = [torch.load(directory / f"shares{rank}.pt", weights_only=False) for rank in range(4)]
    return lambda name: [each[name] for each in verdicts]


@pytest.fixture(scope="module")
def shares(found):
    return lambda name: [each.share for each in found(name)]


@pytest.mark.slow
class TestOfFourRanks:
    def test_hybrid_shards_are_one_group_of_two_shards_in_two_replicas(self, shares):
        hybrid = shares("hybrid")
        assert len({share.group for share in hybrid}) == 1
        assert [share.shard_index for share in hybrid] == [0, 1, 0, 1]
        assert [share.replica_index for share in hybrid] == [0, 0, 1, 1]
        assert {(share.shard_count, share.replica_count) for share in hybrid} == {(2, 2)}
        assert {share.home for share in hybrid} == {"0-3"}

    def test_shards_of_one_rank_are_copies_and_no_tensor_parallelism(self, found):
        for each in found("copied"):
            assert each.sources == {"hsdp"}
            assert (each.share.shard_count, each.share.replica_count) == (1, 4)

    def test_shards_over_both_dimensions_are_four(self, shares):
        both = shares("both")
        assert [share.shard_index for share in both] == [0, 1, 2, 3]
        assert {share.shard_count for share in both} == {4}
        assert both[0].group != shares("hybrid")[0].group

    def test_meshes_of_other_ranks_are_other_groups(self, shares):
        column = shares("column")
        assert column[0].group == column[1].group != column[2].group == column[3].group
        assert [share.home for share in column] == ["0-1", "0-1", "2-3", "2-3"]

    def test_partial_placements_have_no_share(self, found):
        assert {(each.share, each.unsupported) for each in found("partial")} == {(None, PARTIAL)}

    def test_replicas_of_a_subgroup_are_told_apart_from_those_of_another(self, shares):
        pair = shares("pair")
        assert pair[0].group == pair[1].group != pair[2].group == pair[3].group
        assert [share.replica_index for share in pair] == [0, 1, 0, 1]
        assert [share.home for share in pair] == ["0-1", "0-1", "2-3", "2-3"]

    def test_a_norm_next_to_tensor_parallel_layers_is_a_copy(self, shares):
        split, norm = shares("split"), shares("norm")
        assert [share.shard_index for share in split] == [0, 1, 0, 1]
        assert [share.replica_index for share in norm] == [0, 1, 0, 1]
        assert [share.home for share in norm] == ["0-1", "0-1", "2-3", "2-3"]

    def test_also_where_fsdp_shards_it_along_the_other_dimension(self, found, shares):
        split, norm = shares("split on both"), shares("norm on both")
        assert {share.home for share in (*split, *norm)} == {"0-3"}
        assert sorted(share.shard_index for share in split) == [0, 1, 2, 3]
        assert [share.shard_index for share in norm] == [0, 0, 1, 1]
        assert [share.replica_index for share in norm] == [0, 1, 0, 1]
        assert found("norm on both")[0].sources == {"fsdp2", "tp"}

    def test_declared_axes_cross(self, shares):
        split = shares("declared split")
        assert [share.shard_index for share in split] == [0, 1, 0, 1]
        assert [share.replica_index for share in split] == [0, 0, 1, 1]
        assert {share.home for share in split} == {"0-3"}

    def test_declared_own_belongs_to_its_rank(self, shares):
        own = shares("declared own")
        assert [share.home for share in own] == ["0", "1", "2", "3"]
        assert len({share.group for share in own}) == 4

    def test_a_module_follows_the_closest_declaration_above_it(self, shares):
        assert [share.replica_count for share in shares("declared twice")] == [4] * 4

    def test_declared_not_counted_has_no_share(self, found):
        assert {(each.share, each.unsupported) for each in found("declared not")} == {(None, "")}


@pytest.mark.filterwarnings("ignore:FSDP is switching")
def test_wrappers_whose_process_group_was_destroyed_reduce_nothing(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    wrappers = (
        DistributedDataParallel(nn.Linear(2, 2)),
        FullyShardedDataParallel(nn.Linear(2, 2), device_id=torch.device("cpu")),
    )
    while_it_lasts = [bool(axes_by_parameter([wrapper])) for wrapper in wrappers]
    end_process_group()
    assert while_it_lasts == [True, True]
    assert [axes_by_parameter([wrapper]) for wrapper in wrappers] == [{}, {}]
