"""A receiver, and an environment that leads to it and to nothing else."""

import os
from collections.abc import Iterator

import pytest

from tests.exporters.otlp.receiver import OtlpReceiver


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch) -> None:
    """Take away what the machine sets, and keep requests on it."""
    for name in list(os.environ):
        if name.startswith(("OTEL_", "KUBERNETES_")) or name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "15000")


@pytest.fixture
def receiver(monkeypatch) -> Iterator[OtlpReceiver]:
    with OtlpReceiver() as running:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", running.url)
        yield running
