"""Which ranks, shares and steps a root takes for a node's, whatever comes in under its number."""

import pytest
from msgspec.structs import replace

from mp_agent.errors import ReportError
from mp_agent.node.cluster import nodes as nodes_module
from mp_agent.node.cluster import reports as reports_module
from mp_agent.node.cluster.reports import row_bytes
from mp_agent.node.cluster.root import AHEAD_AT_MOST
from mp_agent.node.merge.node_steps import RankStep
from mp_agent.records.node_report import NodeReport, NodeShare
from mp_agent.records.reports import decode_report, encode_report
from mp_agent.records.schema import Share
from mp_agent.records.steps import EndReason
from tests.agent.node.builders import gradient_row, make_record, rank_layers, rank_step
from tests.agent.node.fleet import SimNode, make_root, push, steps_of

WORLD_SIZE = 8
DEADLINE_SECONDS = 20.0


def fsdp(rank: int, sequence: int) -> RankStep:
    share = Share(group="fsdp", shard_index=rank, shard_count=WORLD_SIZE)
    return rank_step(rank, make_record(sequence, {"loss": 1.0}), share)


def node(number: int, *ranks: int, session: str = "") -> SimNode:
    return SimNode(number, ranks, WORLD_SIZE, fsdp, session=session)


def states(root, now_seconds: float) -> dict[int, EndReason]:
    """Return how each rank ended; fails if one has two states."""
    found = root.nodes.statuses(now_seconds)
    assert len({status.rank for status in found}) == len(found)
    return {status.rank: status.end for status in found}


class TestRanks:
    @pytest.mark.parametrize("claimed", [(4, 5, 6), (4, 5, 6, 7), (3, 4)])
    def test_that_a_silent_node_had_come_to_the_one_that_reports_them(self, claimed):
        """A node that named another's ranks first kept it out until the end of the run."""
        own, other = node(0, 0, 1, 2), node(1, 4, 5, 6)
        root = make_root(WORLD_SIZE)
        push(root, own)
        push(root, node(2, *claimed))
        with pytest.raises(ReportError, match="rank 4 is on node 2, not on 1"):
            push(root, other, DEADLINE_SECONDS - 1)

        assert push(root, other, DEADLINE_SECONDS).accepted
        ranks = {known.node_rank: known.ranks for known in root.nodes.described(0.0)}
        left = tuple(rank for rank in claimed if rank not in (4, 5, 6))
        assert ranks == {0: (0, 1, 2), 1: (4, 5, 6)} | ({2: left} if left else {})
        assert {rank: states(root, DEADLINE_SECONDS)[rank] for rank in (4, 5, 6)} == dict.fromkeys(
            (4, 5, 6), EndReason.RUNNING
        )
        assert root.nodes.ranks_known == 3 + 3 + len(left)
        with pytest.raises(ReportError, match="rank 4 is on node 1, not on 2"):
            push(root, node(2, 4, session="again"), DEADLINE_SECONDS)

    def test_of_the_root_itself_are_never_another_nodes(self):
        root = make_root(WORLD_SIZE)
        push(root, node(2, 1, 2))
        push(root, node(0, 0, 1))
        assert states(root, 0.0).keys() == {0, 1, 2}
        assert [known.ranks for known in root.nodes.described(0.0)] == [(0, 1), (2,)]

    def test_of_a_session_that_was_replaced_are_expected_no_more(self):
        root = make_root(WORLD_SIZE)
        push(root, node(0, 0, 1, 2, 3))
        push(root, node(1, 4, 5, 6, 7))
        assert not root.nodes.has_unreported

        push(root, node(1, 4, session="next"), DEADLINE_SECONDS)
        assert root.nodes.has_unreported
        assert push(root, node(2, 5, 6), DEADLINE_SECONDS).accepted
        assert states(root, DEADLINE_SECONDS).keys() == {0, 1, 2, 3, 4, 5, 6}


def test_shares_that_no_node_holds_any_more_are_forgotten():
    root = make_root(WORLD_SIZE)
    push(root, node(0, 0, 1, 2, 3))
    report = node(1, 4).report()
    for number in range(50):
        shares = tuple(
            NodeShare(
                group=f"{number} {name}",
                optimizer="",
                home="",
                shard_count=1,
                replica_count=1,
                assumed=False,
            )
            for name in range(500)
        )
        report = replace(report, shares=shares, held=(0,), holdings=())
        root.receive(report, 0.0, 0.0)
        assert len(root.nodes.held()) == 2
    assert len(root.nodes._shares) < 4 * 500


class TestFinalReport:
    def of_more(self, sent: NodeReport) -> NodeReport:
        """Return a report of a step after the ones of another, at which other shares were held."""
        block = sent.blocks[0]
        newest = block.sequences[-1] + 1
        block = replace(
            block, form=replace(block.form, holding=2), sequences=(newest,), steps=(newest,)
        )
        block = replace(
            block,
            times_unix_seconds=block.times_unix_seconds[:1],
            values=block.values[: 8 * block.form.width],
            digests=block.digests[: 4 * block.form.digests],
        )
        more = replace(
            sent,
            final=False,
            holdings=(*sent.holdings, (), sent.held),
            after=newest - 1,
            position=newest,
            blocks=(block,),
        )
        return decode_report(encode_report(more))

    def test_is_followed_by_more_where_a_rank_was_found_late(self):
        own, other = node(0, 0, 1, 2, 3), node(1, 4, 5, 6, 7)
        root = make_root(WORLD_SIZE)
        for each in (own, other):
            each.write()
        own.write()
        push(root, own)
        other.end()
        final = other.report()
        root.receive(final, 0.0, 0.0)
        assert root.end(0.0) is EndReason.RUNNING
        more = self.of_more(final)
        assert root.receive(more, 0.0, 0.0).accepted
        assert [step.coverage for step in steps_of(root.close_ready(0.0))] == [1.0, 1.0]

        # Again, and once more the one before: neither changes anything.
        root.receive(more, 0.0, 0.0)
        root.receive(replace(more, after=0, position=1, blocks=final.blocks), 0.0, 0.0)
        assert root.late == 0

    def test_that_comes_again_as_one_of_several_is_older(self):
        other = node(1, 4, 5, 6, 7)
        root = make_root(WORLD_SIZE)
        push(root, node(0, 0, 1, 2, 3))
        other.write()
        other.end()
        final = other.report()
        root.receive(final, 0.0, 0.0)
        part = replace(final, final=False, held=(), holdings=final.holdings)
        root.receive(part, 0.0, 0.0)
        known = root.nodes.get(1)
        assert known is not None and known.report.final
        assert len(known.held) == 1

    def test_that_is_refused_is_not_final(self):
        """Its rows are to come: one that is the first of a session was final all the same."""
        other = node(1, 4, 5, 6, 7)
        root = make_root(WORLD_SIZE)
        push(root, node(0, 0, 1, 2, 3))
        for _ in range(3):
            other.write()
        other.report()
        other.end()
        final = replace(other.report(), final=True)
        assert not root.receive(final, 0.0, 0.0).accepted
        assert 1 in root.nodes.awaited
        assert states(root, 0.0).keys() == set(range(8))


@pytest.mark.parametrize("in_blocks", [True, False])
def test_steps_of_a_node_are_kept_up_to_a_limit_until_they_are_merged(monkeypatch, in_blocks):
    monkeypatch.setattr(nodes_module, "OPEN_BYTES_MAX", 8 * 1024)
    own, other = node(0, 0, 1), node(1, 2, 3)
    root = make_root(WORLD_SIZE)
    push(root, own)
    if not in_blocks:
        monkeypatch.setattr(reports_module, "in_blocks", lambda steps: ((), tuple(steps)))
    for _ in range(500):
        other.write()
    while (receipt := push(root, other)).position < 500:
        assert receipt.accepted
    kept = len(root._open)
    assert 0 < kept < 100
    assert root.late == 2 * (500 - kept)

    assert len(list(root.close_all())) == kept
    for _ in range(kept):
        other.write()
    push(root, other)
    assert len(root._open) == kept


class TestLayerTables:
    def with_table(self, sender: SimNode, sequence: int) -> SimNode:
        rows = gradient_row(sum_squares=1.0)[None].repeat(4, axis=0)
        ranks = [rank_layers(rank, fsdp(rank, 1).schema, rows[:1]) for rank in sender.ranks]
        sender.write_layers(sequence, ranks)
        return sender

    @pytest.mark.parametrize(("sequence", "accepted"), [(AHEAD_AT_MOST, True), (2**40, False)])
    def test_far_ahead_of_the_run_are_refused(self, sequence, accepted):
        root = make_root(WORLD_SIZE)
        push(root, node(0, 0, 1))
        other = self.with_table(node(1, 2, 3), sequence)
        assert push(root, other).accepted is accepted
        assert len(root._open_tables) == accepted

    def test_of_a_node_are_kept_up_to_a_limit_until_they_are_merged(self, monkeypatch):
        own, other = node(0, 0, 1), node(1, 2, 3)
        root = make_root(WORLD_SIZE)
        push(root, own)
        size = row_bytes(self.with_table(node(1, 2, 3), 1).report().layers[0])
        monkeypatch.setattr(nodes_module, "OPEN_BYTES_MAX", 2 * size)
        for sequence in (1, 2, 3):
            other.write()
            assert push(root, self.with_table(other, sequence)).accepted
        assert sorted(root._open_tables) == [1, 2]
        push(root, node(1, 2, 3, session="next"), DEADLINE_SECONDS)
        late = root.late
        assert push(root, self.with_table(node(1, 2, 3, session="next"), 4)).accepted
        assert sorted(root._open_tables) == [1, 2]
        assert root.late - late == 2, "the tables of two ranks that found no room"

        list(root.close_all())
        other = node(1, 2, 3, session="next")
        for _ in range(5):
            other.write()
        assert push(root, self.with_table(other, 5), DEADLINE_SECONDS).accepted
        assert sorted(root._open_tables) == [5]
