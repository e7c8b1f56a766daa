"""A real database that takes OTLP: what it stores is what a scrape would have shown."""

import time
from dataclasses import replace

import pytest

from mp_agent.catalog.metric import Snapshot
from tests.exporters.otlp.samples import everything, snapshot
from tests.exporters.otlp.service_loop import started
from tests.exporters.otlp.test_parity import scraped
from tests.exporters.otlp.translation import Series, labels
from tests.waiting import wait_until
from tools.servers.victoria import VictoriaMetrics, victoria_metrics

pytestmark = pytest.mark.e2e

OF_THE_RESOURCE = ("service_", "host_", "process_", "telemetry_", "k8s_")


def now(shown: Snapshot) -> Snapshot:
    return replace(shown, time_unix_seconds=time.time())


def stored(database: VictoriaMetrics) -> Series:
    """Return what is current, without what the resource adds."""
    return {
        (
            row["metric"].pop("__name__"),
            labels({k: v for k, v in row["metric"].items() if not k.startswith(OF_THE_RESOURCE)}),
        ): float(row["value"][1])
        for row in database.query('{__name__=~"mp_agent_.+"}')
    }


def test_the_whole_catalog_is_stored_as_scraped_and_ends_when_it_is_gone(
    server, tmp_path, monkeypatch
):
    with (
        victoria_metrics(server("victoria-metrics"), tmp_path) as database,
        started(tmp_path) as loop,
    ):
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"{database.url}/opentelemetry")
        loop.push(now(everything()))
        assert loop.account().failures == 0
        expected = scraped(everything())
        found = wait_until(lambda: stored(database), what="the series")
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            # It keeps 12 digits.
            assert found[key] == pytest.approx(value, rel=1e-9), key
        loop.push(now(snapshot()))
        wait_until(lambda: not stored(database), what="the end of all series")
