"""A gRPC server made of the protocol's own service classes."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc
from google.rpc.error_details_pb2 import RetryInfo
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import (
    ExportLogsPartialSuccess,
    ExportLogsServiceResponse,
)
from opentelemetry.proto.collector.logs.v1.logs_service_pb2_grpc import (
    LogsServiceServicer,
    add_LogsServiceServicer_to_server,
)
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsPartialSuccess,
    ExportMetricsServiceResponse,
)
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2_grpc import (
    MetricsServiceServicer,
    add_MetricsServiceServicer_to_server,
)


class Collector(MetricsServiceServicer, LogsServiceServicer):
    """Keeps what it is sent; fails with `status`, or rejects `rejected` items, if asked to."""

    def __init__(self) -> None:
        self.url = ""
        self.metrics: list[Any] = []
        self.logs: list[Any] = []
        self.metadata: list[dict[str, str]] = []
        self.log_attempts = 0
        """Requests with logs, whether or not they were accepted."""
        self.status: grpc.StatusCode | None = None
        self.rejected = 0
        self.retry_seconds: int | None = None
        """What the RetryInfo says that comes with `status`; None: there is none."""
        self.explanation = "too old"
        """The message of a partial success."""

    def Export(self, request, context):
        self.metadata.append(dict(context.invocation_metadata()))
        is_metrics = request.DESCRIPTOR.name == "ExportMetricsServiceRequest"
        self.log_attempts += not is_metrics
        if self.status is not None and self.retry_seconds is not None:
            info = RetryInfo(retry_delay={"seconds": self.retry_seconds})
            trailer = ("google.rpc.retryinfo-bin", info.SerializeToString())
            context.set_trailing_metadata((trailer,))
        if self.status is not None:
            context.abort(self.status, "as told")
        (self.metrics if is_metrics else self.logs).append(request)
        if is_metrics:
            partial = ExportMetricsPartialSuccess(
                rejected_data_points=self.rejected, error_message=self.explanation
            )
            return ExportMetricsServiceResponse(partial_success=partial)
        refusal = ExportLogsPartialSuccess(rejected_log_records=self.rejected)
        return ExportLogsServiceResponse(partial_success=refusal)


@contextmanager
def grpc_collector(credentials: grpc.ServerCredentials | None = None) -> Iterator[Collector]:
    """Run a collector, with TLS if credentials are given."""
    service = Collector()
    server = grpc.server(ThreadPoolExecutor(2))
    add_MetricsServiceServicer_to_server(service, server)
    add_LogsServiceServicer_to_server(service, server)
    if credentials is None:
        service.url = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    else:
        service.url = f"https://127.0.0.1:{server.add_secure_port('127.0.0.1:0', credentials)}"
    server.start()
    try:
        yield service
    finally:
        server.stop(0).wait()
