"""The official exporters over HTTP, with sessions that inspect the responses."""

import os
from collections.abc import Callable

from opentelemetry.exporter.otlp.proto.common.metrics_encoder import encode_metrics
from opentelemetry.exporter.otlp.proto.http._log_exporter import OTLPLogExporter
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.metrics.export import MetricExportResult, MetricsData

from mp_agent.exporters.otlp.conversion.stale_series import NoRecordedValues, flag_no_recorded_value
from mp_agent.exporters.otlp.environment import OtlpSignal, OtlpTransport
from mp_agent.exporters.otlp.transport.exporter import OtlpExporter
from mp_agent.exporters.otlp.transport.http_session import CheckedSession


class HttpMetricExporter(OTLPMetricExporter):
    """Can also send points without a value, which end their series."""

    def export(
        self, metrics_data: MetricsData, timeout_millis: float | None = 10_000, **kwargs: object
    ) -> MetricExportResult:
        """Send; see the base class."""
        if isinstance(metrics_data, NoRecordedValues):
            return self._export_batch(flag_no_recorded_value(encode_metrics(metrics_data)))
        return super().export(metrics_data, timeout_millis)


_EXPORTERS: dict[OtlpSignal, Callable[..., OtlpExporter]] = {
    OtlpSignal.METRICS: HttpMetricExporter,
    OtlpSignal.LOGS: OTLPLogExporter,
    OtlpSignal.TRACES: OTLPSpanExporter,
}


def open_http_exporter(
    transport: OtlpTransport, timeout_seconds: float
) -> tuple[OtlpExporter, CheckedSession]:
    """Return an exporter, configured by the OTEL_* variables, and its session."""
    session = CheckedSession(transport.signal)
    # A session passed here would replace the one that a credential provider makes.
    passed = None if _has_credential_provider(transport.signal) else session
    return _EXPORTERS[transport.signal](session=passed, timeout=timeout_seconds), session


def _has_credential_provider(signal: OtlpSignal) -> bool:
    names = (
        "OTEL_PYTHON_EXPORTER_OTLP_HTTP_CREDENTIAL_PROVIDER",
        f"OTEL_PYTHON_EXPORTER_OTLP_HTTP_{signal.value}_CREDENTIAL_PROVIDER",
    )
    return any(os.environ.get(name) for name in names)
