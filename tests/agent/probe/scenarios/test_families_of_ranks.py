"""What two ranks measure with all instruments, merged over one node and over two.

Every family is held against a reference that has the inputs of both ranks and no process group.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import inf

import pytest
import torch
from torch import nn

from mp_agent.catalog.metrics.reinforcement import (
    correlation,
    delta_quantile,
    effective_samples,
    k1,
    k3,
)
from mp_agent.node.accounting.incidents import first_nonfinite_gradient
from mp_agent.probe.instruments.activation_modules import output_row
from mp_agent.records.columns import (
    ACTIVATIONS,
    ATTENTION,
    FP8,
    GRADIENTS,
    LOGITS,
    LOGPROBS,
    ROUTERS,
    TENSORS,
    ColumnFamily,
    by_name,
)
from mp_agent.records.tensor_collections import index_of, ratio_of
from mp_agent.records.views import FirstNonfiniteGradient
from tests.agent.node.nodes import merge_nodes
from tests.agent.probe.fully_shard import strategies
from tests.agent.probe.instruments import tensor_reference
from tests.agent.probe.instruments.fp8_reference import by_cast
from tests.agent.probe.instruments.logprobs_reference import expected_of
from tests.agent.probe.instruments.test_routers_statistics import reference as routers_reference
from tests.agent.probe.ranks import run_ranks
from tests.agent.probe.rings import (
    RingContents,
    merge_layer_tables,
    merge_rings,
    rank_steps,
    read_rings,
)
from tests.agent.probe.scenarios import family_job
from tests.agent.probe.scenarios.family_job import (
    RANKS,
    SAMPLED,
    batch_of,
    logprobs_of,
    make_model,
    watched_tensor,
)

pytestmark = pytest.mark.slow

Rows = dict[str, dict[str, float]]
Rings = Callable[[str], dict[int, RingContents]]
DENSE = list(range(115, 165, 5))


@dataclass(frozen=True)
class Family:
    """What the merge of a family has to be: rows by layer, with the columns that are compared."""

    columns: ColumnFamily
    expected: Callable[[], Rows]
    relative: float = 1e-5
    names: tuple[str, ...] | None = None
    """All layers that have a row, in their order, where `expected` does not name each."""


def expected_outputs() -> Rows:
    """Those of the outputs of both ranks as one batch."""
    batch, rows = [batch_of(rank, SAMPLED).outputs for rank in range(RANKS)], {}
    for name, module in make_model().outputs.named_children():
        batch = [module(part) for part in batch]
        row = output_row(torch.cat(batch).detach(), 0, inf).tolist()
        rows[f"outputs.{name}"] = by_name(ACTIVATIONS.names, row)
    return rows


def expected_attention() -> Rows:
    own, largest = make_model().double().attention, []
    for rank in range(RANKS):
        inputs = batch_of(rank, SAMPLED).sequences.double()
        joint = nn.functional.linear(inputs, own.in_proj_weight, own.in_proj_bias)
        query, key, _ = (
            part.unflatten(-1, (2, 4)).transpose(1, 2) for part in joint.chunk(3, dim=-1)
        )
        largest.append(float((query @ key.mT / 2).detach().max()))
    return {"attention": {"elements": 96.0, "nonfinite_elements": 0.0, "logit_max": max(largest)}}


def expected_routers() -> Rows:
    """Tokens, entropies and experts add up; of loads and logits the largest counts."""
    ranks = []
    for rank in range(RANKS):
        logits = batch_of(rank, SAMPLED).tokens @ make_model().router.weight.detach().T
        chosen = logits.topk(2, dim=-1).indices
        ranks.append(routers_reference(logits.double().tolist(), chosen.tolist()))
    merges = {"load_max": max, "logit_abs_max": max}
    return {"router": {name: merges.get(name, sum)(r[name] for r in ranks) for name in ranks[0]}}


def expected_operands() -> Rows:
    """Elements of each rank's own scale add up; the largest range counts.

    A weight counts whole on every rank, also where FSDP2 shards its layer by itself.
    """
    linear = make_model().operands[0]
    inputs = [batch_of(rank, SAMPLED).operands for rank in range(RANKS)]
    amax = [float(linear(each).detach().abs().max()) for each in inputs]
    assert amax[0] < 448.0 < amax[1]
    cast = [by_cast(each, "input") for each in inputs]
    _, elements, flushed = by_cast(next(linear.parameters()), "weight")
    assert sum(each[2] for each in cast) > 0.0
    return {
        "operands.0": {
            "tensors": 3.0 * RANKS,
            "input_elements": sum(each[1] for each in cast),
            "input_flushed_elements": sum(each[2] for each in cast),
            "weight_elements": RANKS * elements,
            "weight_flushed_elements": RANKS * flushed,
        },
        "operands.1": {
            "amax_max": amax[1],
            "range_used_max": amax[1] / 448.0,
            "scaled_tensors": 3.0 * RANKS,
            "saturated_tensors": 1.0,
        },
    }


def expected_tensors() -> Rows:
    """Those of the tensors of both ranks; what a sum loses is each rank's own."""
    both = tensor_reference.row(torch.cat([watched_tensor(0), watched_tensor(1)]), reduction=True)
    own = [tensor_reference.row(watched_tensor(rank)) for rank in range(RANKS)]
    both["swallowed_sum"] = own[0]["swallowed_sum"] + own[1]["swallowed_sum"]
    return {"inputs": both, "of one rank": {"elements": 16.0}}


FAMILIES = [
    Family(
        ACTIVATIONS,
        expected_outputs,
        relative=1e-6,
        names=(
            "attention",
            *(f"outputs.{place}" for place in range(3)),
            "head",
            "router",
            "operands.0",
            "operands.1",
        ),
    ),
    Family(ATTENTION, expected_attention),
    Family(ROUTERS, expected_routers),
    Family(
        FP8,
        expected_operands,
        names=("outputs.0", "outputs.2", "head", "operands.0", "operands.1"),
    ),
    Family(TENSORS, expected_tensors, relative=1e-12),
]


def expected_logits(without: int = -1) -> dict[str, float]:
    """Those of the ranks whose loss is given logits."""
    model, sums = make_model().double(), []
    for rank in set(range(RANKS)) - {without}:
        inputs = batch_of(rank, SAMPLED).sequences.double()
        attended = model.attention(inputs, inputs, inputs)[0]
        sums += model.head(attended).detach().logsumexp(-1).flatten().tolist()
    return {
        "rows": float(len(sums)),
        "logsumexp_max": max(sums),
        "logsumexp_min": min(sums),
        "logsumexp_sum": sum(sums),
    }


@pytest.fixture(scope="module")
def rings(tmp_path_factory: pytest.TempPathFactory) -> Rings:
    """Train all scenarios, once, and return a function that reads the rings of one."""
    directory = tmp_path_factory.mktemp("families")
    run_ranks(family_job.run, directory, ranks=RANKS)
    return lambda scenario: read_rings(directory / scenario, RANKS, one_schema=False)


def same_as(expected: Mapping[str, float], relative: float) -> object:
    return pytest.approx(expected, rel=relative)


def without_others(row: Mapping[str, float], expected: Mapping[str, float]) -> dict[str, float]:
    return {name: row[name] for name in expected}


@pytest.mark.parametrize("strategy", strategies(family_job.STRATEGIES))
class TestAllInstrumentsTogether:
    @pytest.mark.parametrize("nodes", [1, 2])
    @pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.columns.name)
    def test_rows_of_layers_are_those_of_both_ranks(self, rings, strategy, family, nodes):
        merged = merge_layer_tables(rings(strategy), nodes=nodes, family=family.columns.name)
        table, expected = merged[SAMPLED], family.expected()
        pairs = zip(table.names, table.values.tolist(), strict=True)
        rows = {name: by_name(family.columns.names, row) for name, row in pairs}
        assert table.complete
        assert tuple(filter(rows.get, rows)) == (family.names or tuple(expected))
        for name, wanted in expected.items():
            assert without_others(rows[name], wanted) == same_as(wanted, family.relative), name

    @pytest.mark.parametrize("nodes", [1, 2])
    def test_a_step_counts_once_all_ranks_are_there(self, rings, strategy, nodes):
        found = rings(strategy)
        together = merge_rings(found, nodes=nodes)[SAMPLED - 1]
        steps = rank_steps(found, SAMPLED - 1)
        alone = merge_nodes([steps[:1]], RANKS, absent=steps[1:])
        for family in (ACTIVATIONS, ATTENTION, LOGITS, ROUTERS, FP8):
            assert together.counts(family), family.name
            assert not alone.counts(family), f"{family.name}: a rank is missing"
        outputs = 7 * (8 + 8 + 2)
        others = 12 * (8 + 5) + 18 * (4 + 2) + 18 * (8 + 8)
        assert together.families[ACTIVATIONS.name]["elements"] == outputs + others

    @pytest.mark.parametrize("nodes", [1, 2])
    def test_output_logits_are_those_of_all_ranks_losses(self, rings, strategy, nodes):
        row = merge_rings(rings(strategy), nodes=nodes)[SAMPLED - 1].families[LOGITS.name]
        expected = expected_logits()
        assert without_others(row, expected) == same_as(expected, 1e-5)

    @pytest.mark.parametrize("nodes", [1, 2])
    def test_the_slice_with_the_largest_range_is_that_of_its_rank(self, rings, strategy, nodes):
        table = merge_layer_tables(rings(strategy), nodes=nodes, family=TENSORS.name)[SAMPLED]
        ratio = by_name(TENSORS.names, table.values[table.names.index("inputs")])["range_ratio"]
        ranges = tensor_reference.ranges(tensor_reference.values_of(watched_tensor(1)), -1)
        assert index_of(ratio) == 2
        assert ratio_of(ratio) == pytest.approx(ranges.max() / ranges.min(), rel=2.0**-31)

    @pytest.mark.parametrize("nodes", [1, 2])
    @pytest.mark.parametrize(("step", "ranks"), [(1, (0, 1)), (2, (1,))])
    def test_logprobs_are_what_numpy_makes_of_all_tokens(self, rings, strategy, step, ranks, nodes):
        tokens = [logprobs_of(rank, step, part) for rank in ranks for part in range(2)]
        expected = expected_of(
            *(
                torch.cat([each.reshape(-1) for each in own]).double().numpy()
                for own in zip(*tokens, strict=True)
            )
        )
        found = rings(strategy)
        merged = merge_rings(found, nodes=nodes)[step - 1]
        row = merged.families[LOGPROBS.name]
        assert merged.counts(LOGPROBS), "a rank without tokens is no missing rank"
        assert merged.counts(GRADIENTS)
        assert (row["tokens"], row["nonfinite_tokens"]) == (expected.tokens, expected.nonfinite)
        assert row["delta_abs_max"] == expected.largest
        figures = (k1(row), k3(row), correlation(row), effective_samples(row))
        wanted = (expected.k1, expected.k3, expected.correlation, expected.effective)
        assert figures == pytest.approx(wanted, rel=1e-9)
        tail = delta_quantile(row, 0.999)
        assert tail is not None
        assert expected.tail is not None
        assert expected.tail <= tail <= 2.0**0.25 * expected.tail

        steps = rank_steps(found, step - 1)
        alone = merge_nodes([steps[1:]], RANKS, absent=steps[:1])
        assert not alone.counts(LOGPROBS), "a rank is missing that may have had tokens"

    def test_nothing_fails_and_nothing_is_left_out(self, rings, strategy):
        for ring in rings(strategy).values():
            assert ring.state.probe_errors == 0
            assert ring.state.unsupported == ()

    def test_all_ranks_sample_the_same_steps(self, rings, strategy):
        """More of them after a NaN on one rank."""
        found = rings(f"{strategy}_dense")
        for family in (GRADIENTS.name, ACTIVATIONS.name):
            for ring in found.values():
                sampled = [table.sequence for table in ring.layers if family in table.families]
                later = [step for step in sampled if step > family_job.TROUBLED + 1]
                assert later == DENSE
            merged = merge_layer_tables(found, sequences=DENSE, family=family)
            assert list(merged) == DENSE
            assert all(table.complete for table in merged.values())


@pytest.mark.parametrize("nodes", [1, 2])
def test_a_rank_whose_loss_is_given_no_logits_is_no_missing_rank(rings, nodes):
    merged = merge_rings(rings("without_loss"), nodes=nodes)[SAMPLED - 1]
    assert merged.counts(ATTENTION)
    assert merged.counts(LOGITS)
    expected = expected_logits(without=0)
    assert without_others(merged.families[LOGITS.name], expected) == same_as(expected, 1e-5)


@pytest.mark.parametrize("nodes", [1, 2])
def test_the_module_of_one_ranks_backward_is_known_for_the_run(rings, nodes):
    merged = merge_layer_tables(rings("bad_backward"), nodes=nodes, family=ACTIVATIONS.name)[2]
    found = first_nonfinite_gradient(2, merged.views(step_judged=True))
    assert found == FirstNonfiniteGradient(step=2, layer="1", place="within")
