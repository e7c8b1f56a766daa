"""Ranks' rows merged as if they came from several nodes, without transport and time."""

from collections.abc import Sequence

from mp_agent.node.merge.coverage import AssumedShares, ExpectedShares, make_expected_shares
from mp_agent.node.merge.node_layers import LayerNames, RankLayers, reduce_layers
from mp_agent.node.merge.node_steps import RankStep, reduce_step
from mp_agent.node.merge.run_layers import LayerMerge, MergedLayers, ReportLayerColumns
from mp_agent.node.merge.run_steps import ReportColumns, StepMerge
from mp_agent.node.merge.schema_index import SchemaIndex
from mp_agent.records.columns import GRADIENTS
from mp_agent.records.merged import MergedStep
from mp_agent.records.schema import family_columns


def merge_nodes(
    nodes: Sequence[Sequence[RankStep]],
    world_size: int | None = None,
    *,
    assumed: AssumedShares | None = None,
    absent: Sequence[RankStep] = (),
    layers: Sequence[RankLayers] = (),
) -> MergedStep:
    """Return the step that the nodes' ranks make together, in the order of the nodes.

    absent: ranks whose shares are known, but which did not deliver the step. The first node is
    the root's own. layers: the ranks' layer tables of the step.
    """
    nodes = [node for node in nodes if node]
    present = [step for node in nodes for step in node]
    world_size = world_size or len(present)
    merge = StepMerge(present[0].record.sequence, world_size)
    for number, node in enumerate(nodes):
        schema_index = SchemaIndex()
        step = reduce_step(node, schema_index)
        terms = ReportColumns(
            schema_index.step_columns,
            family_columns(schema_index.families),
            schema_index.shares,
        )
        merge.add(step, terms, arrived_unix_seconds=50.0 if number else None)
    expected_shares = _expected_shares([*present, *absent], world_size)
    copies = _layers_of([layers], world_size).copies if layers else None
    return merge.merged(expected_shares, assumed or AssumedShares(), copies)


def merge_node_layers(
    nodes: Sequence[Sequence[RankLayers]],
    world_size: int | None = None,
    *,
    assumed: AssumedShares | None = None,
    names: LayerNames | None = None,
    family: str = GRADIENTS.name,
) -> MergedLayers:
    """Return the table of a family that the nodes' ranks make together."""
    nodes = [node for node in nodes if node]
    tables = [table for node in nodes for table in node]
    world_size = world_size or len(tables)
    merge = _layers_of(nodes, world_size)
    expected_shares = _expected_shares(tables, world_size)
    families = merge.merged(expected_shares, assumed or AssumedShares(), names or LayerNames())
    return families[family]


def _layers_of(nodes: Sequence[Sequence[RankLayers]], world_size: int) -> LayerMerge:
    merge = LayerMerge(world_size)
    for node in nodes:
        schema_index = SchemaIndex()
        table = reduce_layers(1, node, schema_index)
        merge.add(
            table,
            ReportLayerColumns(
                family_columns(schema_index.families), schema_index.shares, schema_index.layouts
            ),
        )
    return merge


def _expected_shares(ranks: Sequence[RankStep | RankLayers], world_size: int) -> ExpectedShares:
    schema_index = SchemaIndex()
    for rank in ranks:
        schema_index.plan(rank.schema)
    known = len({rank.rank for rank in ranks})
    return make_expected_shares(schema_index.shares, ranks_known=known, world_size=world_size)
