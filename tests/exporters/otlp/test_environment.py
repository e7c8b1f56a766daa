import logging

import pytest

from mp_agent.exporters.otlp.environment import OtlpEnvironment, OtlpSignal, read_environment


def read(**variables: str) -> OtlpEnvironment:
    return read_environment({f"OTEL_{name}": value for name, value in variables.items()})


def test_the_defaults_are_http_every_15_seconds():
    environment = read()
    assert set(environment.transports) == set(OtlpSignal)
    assert environment.interval_seconds == 15.0
    assert environment.export_timeout_seconds == 30.0
    assert not environment.transports[OtlpSignal.METRICS].grpc
    assert environment.transports[OtlpSignal.METRICS].timeout_seconds == 10.0


def test_the_interval_is_in_milliseconds():
    environment = read(METRIC_EXPORT_INTERVAL="2500", METRIC_EXPORT_TIMEOUT="4000")
    assert (environment.interval_seconds, environment.export_timeout_seconds) == (2.5, 4.0)


def test_a_signals_own_variables_win():
    environment = read(
        EXPORTER_OTLP_PROTOCOL="grpc",
        EXPORTER_OTLP_LOGS_PROTOCOL="http/protobuf",
        EXPORTER_OTLP_TIMEOUT="3",
        EXPORTER_OTLP_METRICS_TIMEOUT="7.5",
        EXPORTER_OTLP_COMPRESSION="gzip",
        EXPORTER_OTLP_METRICS_COMPRESSION="none",
    )
    metrics, logs = (
        environment.transports[OtlpSignal.METRICS],
        environment.transports[OtlpSignal.LOGS],
    )
    assert (metrics.grpc, metrics.timeout_seconds, metrics.gzip_over_grpc) == (True, 7.5, False)
    assert (logs.grpc, logs.timeout_seconds) == (False, 3.0)
    assert environment.transports[OtlpSignal.TRACES].gzip_over_grpc


def test_a_timeout_meant_in_milliseconds_is_held_to_that_of_the_push():
    environment = read(EXPORTER_OTLP_TIMEOUT="10000", METRIC_EXPORT_TIMEOUT="20000")
    assert environment.transports[OtlpSignal.METRICS].timeout_seconds == 20.0


@pytest.mark.parametrize("value", ["true", "TRUE", " True "])
def test_the_sdk_can_be_disabled(value):
    assert read(SDK_DISABLED=value).transports == {}


def test_each_signal_can_be_switched_off():
    environment = read(METRICS_EXPORTER="none", TRACES_EXPORTER="NONE", LOGS_EXPORTER="otlp")
    assert set(environment.transports) == {OtlpSignal.LOGS}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("OTEL_METRIC_EXPORT_INTERVAL", "soon"),
        ("OTEL_METRIC_EXPORT_INTERVAL", "0"),
        ("OTEL_METRIC_EXPORT_TIMEOUT", "-1"),
        ("OTEL_EXPORTER_OTLP_METRICS_TIMEOUT", "nan"),
        ("OTEL_EXPORTER_OTLP_TIMEOUT", "1e999"),
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "http/json"),
        ("OTEL_EXPORTER_OTLP_COMPRESSION", "zstd"),
        ("OTEL_SDK_DISABLED", "1"),
        ("OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE", "delta"),
        (
            "OTEL_EXPORTER_OTLP_METRICS_DEFAULT_HISTOGRAM_AGGREGATION",
            "base2_exponential_bucket_histogram",
        ),
    ],
)
def test_what_cannot_be_followed_is_named_once_and_the_default_used(name, value, caplog):
    with caplog.at_level(logging.WARNING):
        environment = read_environment({name: value})
    assert environment == read_environment({})
    (record,) = caplog.records
    assert name in record.getMessage()


def test_a_signals_own_value_that_is_wrong_leaves_that_of_all_signals():
    environment = read(
        EXPORTER_OTLP_METRICS_PROTOCOL="http/json",
        EXPORTER_OTLP_PROTOCOL="grpc",
        EXPORTER_OTLP_METRICS_COMPRESSION="zstd",
        EXPORTER_OTLP_COMPRESSION="gzip",
    )
    metrics = environment.transports[OtlpSignal.METRICS]
    assert (metrics.grpc, metrics.gzip_over_grpc) == (True, True)


def test_deflate_is_for_http(caplog):
    environment = read(EXPORTER_OTLP_METRICS_PROTOCOL="grpc", EXPORTER_OTLP_COMPRESSION="deflate")
    assert not environment.transports[OtlpSignal.METRICS].gzip_over_grpc
    (record,) = caplog.records
    assert "metrics are sent uncompressed" in record.getMessage()


def test_an_empty_variable_counts_as_not_set(caplog):
    variables = {
        "OTEL_METRIC_EXPORT_INTERVAL": "",
        "OTEL_EXPORTER_OTLP_METRICS_TIMEOUT": " ",
        "OTEL_EXPORTER_OTLP_ENDPOINT": "",
        "PATH": "",
    }
    assert read_environment(variables) == read_environment({})
    assert variables == {"PATH": ""}
    assert caplog.text == ""


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("OTEL_EXPORTER_OTLP_METRICS_TIMEOUT", "ten"),
        ("OTEL_EXPORTER_OTLP_METRICS_COMPRESSION", "zstd"),
    ],
)
def test_the_exporters_do_not_see_what_they_would_trip_over(name, value):
    variables = {name: value}
    read_environment(variables)
    assert variables == {}
