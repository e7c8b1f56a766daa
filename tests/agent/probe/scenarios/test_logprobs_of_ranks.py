"""Log-probabilities of two ranks' tokens, merged: exactly those of all tokens together."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from mp_agent.catalog.metrics.reinforcement import (
    correlation,
    delta_quantile,
    effective_samples,
    k1,
    k3,
)
from mp_agent.node.merge.node_steps import RankStep
from mp_agent.probe.probe import Probe
from mp_agent.records.columns import GRADIENTS, LOGPROBS
from mp_agent.ring.writer import RingWriter
from mp_agent.settings import Settings
from tests.agent.node.nodes import merge_nodes
from tests.agent.probe.instruments.logprobs_reference import expected_of
from tests.agent.probe.ranks import run_ranks
from tests.agent.probe.rings import make_identity, read_ring
from tests.gloo import end_process_group

pytestmark = pytest.mark.slow

RANKS, STEPS = 2, 2


def reported(rank: int, step: int, part: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What a rank reports: more tokens on the second rank, of which some are no numbers."""
    generator = torch.Generator().manual_seed(100 * rank + 10 * step + part)
    shape = (2, 40 + 300 * rank)
    trainer = -torch.rand(shape, generator=generator).mul(3)
    sampler = trainer + 0.2 * (rank + 1) * torch.randn(shape, generator=generator)
    sampler[0, 7 * rank] = float("-inf")
    return trainer, sampler, torch.rand(shape, generator=generator) < 0.8


def train(rank: int, directory: Path) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{directory}/store", rank=rank, world_size=RANKS
    )
    model = DistributedDataParallel(torch.nn.Linear(4, 2))
    writer = RingWriter.create(directory / f"rank{rank}.ring", make_identity(rank, RANKS))
    probe = Probe(lambda: writer, Settings())
    probe.attach()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for step in range(1, STEPS + 1):
        for part in range(2):
            if rank == 1 or step == 1:
                probe.observe_logprobs(*reported(rank, step, part))
        model(torch.ones(3, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    probe.flush()
    probe.detach()
    writer.close()
    end_process_group()


@pytest.mark.parametrize("nodes", [1, 2])
def test_the_merge_is_what_numpy_makes_of_the_tokens_of_all_ranks(nodes, tmp_path):
    run_ranks(train, tmp_path, ranks=RANKS)
    rings = {rank: read_ring(tmp_path / f"rank{rank}.ring") for rank in range(RANKS)}
    for step, ranks in ((1, (0, 1)), (2, (1,))):
        tokens = [reported(rank, step, part) for rank in ranks for part in range(2)]
        trainer, sampler, mask = (
            torch.cat([each.reshape(-1) for each in own]).double().numpy()
            for own in zip(*tokens, strict=True)
        )
        expected = expected_of(trainer, sampler, mask)
        steps = [RankStep(rank, own.schema, own.records[step - 1]) for rank, own in rings.items()]
        merged = merge_nodes([steps] if nodes == 1 else [[each] for each in steps], RANKS)
        row = merged.families[LOGPROBS.name]

        assert merged.counts(LOGPROBS), "a rank without tokens is no missing rank"
        assert merged.counts(GRADIENTS)
        assert (row["tokens"], row["nonfinite_tokens"]) == (expected.tokens, expected.nonfinite)
        assert row["delta_abs_max"] == expected.largest
        found = (k1(row), k3(row), correlation(row), effective_samples(row))
        wanted = (expected.k1, expected.k3, expected.correlation, expected.effective)
        assert found == pytest.approx(wanted, rel=1e-9)
        tail = delta_quantile(row, 0.999)
        assert tail is not None
        assert expected.tail is not None
        assert expected.tail <= tail <= 2.0**0.25 * expected.tail

        alone = merge_nodes([steps[1:]], RANKS, absent=steps[:1])
        assert not alone.counts(LOGPROBS), "a rank is missing that may have had tokens"
