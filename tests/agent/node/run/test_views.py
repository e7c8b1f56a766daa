"""The views of a run that the exporters read."""

from mp_agent.node.run.views import ServiceCounts
from mp_agent.records.views import ExportAccount, TransportView
from tests.agent.node.conftest import OpenRun, StartRank
from tests.agent.node.shown import shown

SERVICES = ServiceCounts(
    scrape_duration_seconds=0.5,
    transport=TransportView(push_failures=3),
    exports=(ExportAccount(exporter="otlp", failures=4, last_success_unix_seconds=None),),
    flight_records=2,
    flight_errors=1,
)


def test_the_agents_view_has_the_counts_of_its_services(start_rank: StartRank, open_run: OpenRun):
    start_rank().steps(2)
    run = open_run()
    run.poll(0.0)
    agent = run.export(0.0, 1_000.0, services=SERVICES).agent

    assert agent.scrape_duration_seconds == 0.5
    assert agent.transport.push_failures == 3
    assert [account.failures for account in agent.exports] == [4]
    assert (agent.flight_records, agent.flight_errors) == (2, 1)
    assert run.export(0.0, 1_000.0).agent.transport == TransportView()


def test_a_superseded_root_exports_its_ranks_but_not_the_run(
    start_rank: StartRank, open_run: OpenRun
):
    start_rank().steps(2)
    run = open_run()
    run.poll(0.0)
    assert run.export(0.0, 1_000.0).view is not None

    export = run.export(0.0, 1_000.0, superseded=True)
    assert export.view is None
    assert export.layers == ()
    assert [rank.identity.rank for rank in export.ranks] == [0]
    assert export.agent.version


def test_no_loss_is_shown_while_a_scale_that_no_hook_sees_multiplies_it(
    start_rank: StartRank, open_run: OpenRun
):
    rank = start_rank()
    rank.steps(1, loss=2.5)
    run = open_run()
    run.poll(0.0)
    assert (shown(run)["loss"], shown(run)["rank_loss{0}"]) == (2.5, 2.5)
    assert run.history.columns()["loss"] == [2.5]

    rank.steps(4, loss=2.5 * 4096, loss_factor=4096.0)
    run.poll(1.0)
    assert not {"loss", "rank_loss{0}"} & shown(run).keys()
    assert run.history.columns()["loss"] == [None] * 5
