"""Runs that are restricted to a process group or a mesh."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist

import mp_agent
from mp_agent.errors import SettingError
from mp_agent.probe.processes.launchers import Members, members_of
from mp_agent.ring import locations
from mp_agent.ring.reader import RingReader
from tests.agent.probe.rings import make_identity

ROOT = Path(__file__).parents[4]


def identity(rank: int, local_world_size: int):
    return replace(
        make_identity(rank, 8),
        local_rank=rank % local_world_size,
        local_world_size=local_world_size,
        node_rank=rank // local_world_size,
    )


class TestNumbering:
    def test_counts_members_only_in_ascending_order(self):
        numbered = Members((1, 3, 6)).numbered(identity(6, 8))
        assert (numbered.rank, numbered.world_size) == (2, 3)
        assert (numbered.local_rank, numbered.local_world_size) == (2, 3)

    @pytest.mark.parametrize(
        ("rank", "expected"), [(1, (0, 0, 2, 0)), (3, (1, 1, 2, 0)), (6, (2, 0, 1, 1))]
    )
    def test_restarts_on_each_node(self, rank, expected):
        one = Members((1, 3, 6)).numbered(identity(rank, 4))
        assert (one.rank, one.local_rank, one.local_world_size, one.node_rank) == expected

    def test_names_the_run_by_its_ranks(self):
        assert Members((1, 3), "-ranks1,3").numbered(identity(1, 8)).run == "test-ranks1,3"


class TestMembersOf:
    @pytest.mark.parametrize("value", [7, "dp", [0, 1], object()])
    def test_anything_else_is_refused_by_name_and_value(self, value):
        with pytest.raises(SettingError, match=r"process_group has value .*: must be a process"):
            members_of(value, named=False)

    def test_a_wrong_one_raises_at_init(self):
        with pytest.raises(SettingError, match="process_group has value 7"):
            mp_agent.init(process_group=7, node_agent="none")  # type: ignore[arg-type] # wrong on purpose

    def test_a_rank_outside_of_the_group_has_none(self):
        assert members_of(dist.GroupMember.NON_GROUP_MEMBER, named=False) is None


_SCRIPT = """
import faulthandler, os, sys, torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
import mp_agent
from tests.gloo import end_process_group
faulthandler.dump_traceback_later(60, exit=True)
dist.init_process_group("gloo")
rank = dist.get_rank()
settings = dict(node_agent="none", dir=sys.argv[1], layer_interval=1)
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("policy", "data"))
lonely = dist.new_group([3])
mp_agent.init(process_group=lonely, run="lonely", **settings)
mp_agent.init(process_group=mesh["data"], **settings)
torch.manual_seed(rank // 2)
model = torch.nn.parallel.DistributedDataParallel(
    torch.nn.Linear(3, 3), process_group=mesh.get_group("data")
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
dist.barrier()
end_process_group()
"""


@pytest.mark.long
@pytest.mark.slow
def test_two_groups_of_a_job_are_two_runs_and_others_do_nothing(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(_SCRIPT)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4"]
    subprocess.run(
        [*torchrun, "--rdzv-id=job", str(script), str(tmp_path / "shm")],
        check=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": f"{ROOT / '.editable'}:{ROOT}", "OMP_NUM_THREADS": "1"},
    )
    found: dict[str, dict[int, RingReader]] = {}
    for run_dir in locations.find_runs(tmp_path / "shm"):
        for path in locations.find_rings(run_dir):
            reader = RingReader.open(path)
            found.setdefault(reader.identity.run, {})[reader.identity.rank] = reader
    by_suffix = {name.rpartition("-ranks")[2]: readers for name, readers in found.items()}
    assert {name: sorted(readers) for name, readers in by_suffix.items()} == {
        "0-1": [0, 1],
        "2-3": [0],  # the other one is in a run of its own already
        "lonely": [0],
    }
    first = by_suffix["0-1"]
    for reader in first.values():
        assert reader.identity.world_size == reader.identity.local_world_size == 2
        assert reader.schema is not None and reader.schema.shares[0].home == "0-1"
        assert reader.state.committed_sequence == 3
    assert found["lonely"][0].identity.world_size == 1
    for readers in found.values():
        for reader in readers.values():
            reader.close()
