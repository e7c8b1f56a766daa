"""Shares: who holds what, told alike by all ranks. Wrapped ones are tested in real jobs."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from mp_agent.probe import placement
from mp_agent.probe.placement import describe_ranks, share_of
from mp_agent.records.schema import Share


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


def test_a_world_of_one_holds_everything():
    assert share_of(nn.Parameter(torch.ones(1)), None, 1) == Share(group="single")


def test_plain_parameters_among_others_are_only_assumed():
    assert share_of(nn.Parameter(torch.ones(1)), None, 4).assumed


def test_world_size_comes_from_torchrun_before_there_is_a_group(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "6")
    assert placement.world_size() == 6
    monkeypatch.delenv("WORLD_SIZE")
    assert placement.world_size() == 1


def _shares_of_rank(rank: int, directory: Path) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{directory}/rendezvous", rank=rank, world_size=4
    )
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    tensor = torch.arange(8.0)
    shares = {
        "hybrid": share_of(distribute_tensor(tensor, mesh, [Replicate(), Shard(0)]), None, 4),
        "both": share_of(distribute_tensor(tensor, mesh, [Shard(0), Shard(0)]), None, 4),
        "column": share_of(distribute_tensor(tensor, mesh["shard"], [Shard(0)]), None, 4),
        "partial": share_of(
            torch.distributed.tensor.DTensor.from_local(tensor, mesh["shard"], [Partial()]), None, 4
        ),
    }
    pair = mesh.get_group("shard")
    model = DistributedDataParallel(nn.Linear(1, 1), process_group=pair)
    shares["pair"] = share_of(model.module.weight, model, 4)
    torch.save(shares, directory / f"shares{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def shares(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Share]]:
    """The shares that each of four ranks tells."""
    directory = tmp_path_factory.mktemp("shares")
    torch.multiprocessing.spawn(_shares_of_rank, args=(directory,), nprocs=4)
    return [torch.load(directory / f"shares{rank}.pt", weights_only=False) for rank in range(4)]


@pytest.mark.slow
class TestOfFourRanks:
    def test_hybrid_shards_are_one_group_of_two_shards_in_two_replicas(self, shares):
        hybrid = [each["hybrid"] for each in shares]
        assert len({share.group for share in hybrid}) == 1
        assert [share.shard_index for share in hybrid] == [0, 1, 0, 1]
        assert [share.replica_index for share in hybrid] == [0, 0, 1, 1]
        assert {(share.shard_count, share.replica_count) for share in hybrid} == {(2, 2)}

    def test_shards_over_both_dimensions_are_four(self, shares):
        both = [each["both"] for each in shares]
        assert [share.shard_index for share in both] == [0, 1, 2, 3]
        assert {share.shard_count for share in both} == {4}
        assert both[0].group != shares[0]["hybrid"].group

    def test_meshes_of_other_ranks_are_other_groups(self, shares):
        column = [each["column"] for each in shares]
        assert column[0].group == column[1].group != column[2].group == column[3].group

    def test_partial_placements_have_no_share(self, shares):
        assert [each["partial"] for each in shares] == [None] * 4

    def test_replicas_of_a_subgroup_are_told_from_those_of_another(self, shares):
        pair = [each["pair"] for each in shares]
        assert pair[0].group == pair[1].group != pair[2].group == pair[3].group
        assert [share.replica_index for share in pair] == [0, 1, 0, 1]
        assert {share.replica_count for share in pair} == {2}
