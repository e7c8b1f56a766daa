"""A receiver, and an environment that leads to it and to nothing else."""

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.exporters.otlp.receiver import Answer, OtlpReceiver


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


@pytest.fixture
def short_timeout(monkeypatch) -> None:
    """Give up before the first repetition, which the exporters make after a second."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.5")


@pytest.fixture
def answers(receiver) -> Callable[..., None]:
    """Let the receiver answer every request alike from now on."""

    def let(**answer: Any) -> None:
        receiver.answer = lambda path: Answer(**answer)

    return let
