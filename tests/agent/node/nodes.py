"""Ranks' rows merged as if they came from several nodes, without transport and time."""

from collections.abc import Sequence

from mp_agent.node.merge.coverage import AssumedShares, Roster, make_roster
from mp_agent.node.merge.layer_names import LayerNames
from mp_agent.node.merge.node_layers import RankLayers, reduce_layers
from mp_agent.node.merge.node_steps import RankStep, reduce_step
from mp_agent.node.merge.run_layers import LayerMerge, LayerTerms, MergedLayers
from mp_agent.node.merge.run_steps import StepMerge, Terms
from mp_agent.node.merge.schema_index import NodeBook
from mp_agent.records.merged import MergedStep


def merge_nodes(
    nodes: Sequence[Sequence[RankStep]],
    world_size: int | None = None,
    *,
    assumed: AssumedShares | None = None,
    absent: Sequence[RankStep] = (),
) -> MergedStep:
    """Return the step that the nodes' ranks make together, in the order of the nodes.

    absent: ranks whose shares are known, but which did not deliver the step. The first node is
    the root's own.
    """
    nodes = [node for node in nodes if node]
    present = [step for node in nodes for step in node]
    world_size = world_size or len(present)
    merge = StepMerge(present[0].record.sequence, world_size)
    for number, node in enumerate(nodes):
        book = NodeBook()
        step = reduce_step(node, book)
        terms = Terms(book.step_columns, book.gradient_columns, book.shares)
        merge.add(step, terms, arrived_unix_seconds=50.0 if number else None)
    roster = _roster([*present, *absent], world_size)
    return merge.merged(roster, assumed or AssumedShares())


def merge_node_layers(
    nodes: Sequence[Sequence[RankLayers]],
    world_size: int | None = None,
    *,
    assumed: AssumedShares | None = None,
    names: LayerNames | None = None,
) -> MergedLayers:
    """Return the table that the nodes' ranks make together."""
    nodes = [node for node in nodes if node]
    tables = [table for node in nodes for table in node]
    world_size = world_size or len(tables)
    merge = LayerMerge(world_size)
    for node in nodes:
        book = NodeBook()
        table = reduce_layers(1, node, book)
        merge.add(table, LayerTerms(book.gradient_columns, book.shares, book.layouts))
    roster = _roster(tables, world_size)
    return merge.merged(roster, assumed or AssumedShares(), names or LayerNames())


def _roster(ranks: Sequence[RankStep | RankLayers], world_size: int) -> Roster:
    book = NodeBook()
    for rank in ranks:
        book.plan(rank.schema)
    known = len({rank.rank for rank in ranks})
    return make_roster(book.shares, ranks_known=known, world_size=world_size)
