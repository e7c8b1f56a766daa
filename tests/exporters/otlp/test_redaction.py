import logging

from mp_agent.exporters.otlp.environment import LogCapture, Redactor
from tests.subtests import each

SECRET = "s3cr3t/+="


@each(
    ("name", "value"),
    [
        ("OTEL_EXPORTER_OTLP_HEADERS", f"api-key={SECRET}"),
        ("OTEL_EXPORTER_OTLP_METRICS_HEADERS", f"a=b,authorization=Bearer {SECRET}"),
        ("OTEL_EXPORTER_OTLP_HEADERS", f"Authorization: Basic {SECRET}"),
        ("OTEL_EXPORTER_OTLP_HEADERS", "api-key=s3cr3t%2F%2B%3D"),
        ("OTEL_EXPORTER_OTLP_LOGS_HEADERS", f"{SECRET}"),
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "https://user:s3cr3t%2F%2B%3D@host:4318"),
        ("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT", "https://host/v1/metrics?key=s3cr3t%2F%2B%3D"),
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "user:s3cr3t%2F%2B%3D@host:4317"),
    ],
)
def test_a_secret_is_found_in_every_form(name, value):
    redactor = Redactor({name: value})
    for text in (SECRET, f"bad header: {value}", f"url: {value.partition('//')[2] or value}"):
        shown = redactor.redact(f"before {text} after")
        assert "s3cr3t" not in shown, shown
        assert shown.startswith("before ")
    assert "s3cr3t" not in repr(redactor)


def test_text_without_secrets_stays():
    redactor = Redactor({"OTEL_EXPORTER_OTLP_HEADERS": "a=1", "OTEL_SERVICE_NAME": "secret"})
    assert redactor.redact("1 secret, and a=1") == "1 secret, and ***"
    assert Redactor({}).redact("nothing to hide") == "nothing to hide"


def test_a_capture_keeps_what_exporters_log_from_everybody_else(caplog):
    capture = LogCapture(Redactor({"OTEL_EXPORTER_OTLP_HEADERS": f"k={SECRET}"}))
    logger = logging.getLogger("opentelemetry.exporter.otlp")
    capture.install()
    try:
        logger.warning("no good header: %s", SECRET)
        logging.getLogger("urllib3.connectionpool").warning("at /?k=%s", SECRET)
        try:
            raise ValueError(SECRET)
        except ValueError:
            logger.exception("went wrong")
        logger.warning("%d", "not a number")
    finally:
        capture.remove()
    assert caplog.text == ""
    said = capture.pop()
    assert "no good header: ***" in said and "at /?***" in said and "ValueError('***')" in said
    assert SECRET not in said
    assert capture.pop() == ""

    logger.warning("heard again")
    assert "heard again" in caplog.text
