from mp_agent.exporters.prometheus import content_type
from mp_agent.node.http.server import accepts_gzip, wanted_types
from tests.subtests import each


@each(
    ("accept_encoding", "gzip"),
    [
        ("gzip", True),
        ("GZIP", True),
        ("x-gzip", True),
        ("deflate, gzip;q=1.0, *;q=0.5", True),
        ("gzip;q=0.001", True),
        ("*", True),
        ("br, *;q=0.1", True),
        ("identity;q=0, *", True),
        ("", False),
        ("identity", False),
        ("gzip;q=0", False),
        ("gzip; q=0.000", False),
        ("gzip;Q=0", False),
        ("gzip;q=0, *;q=1", False),
        ("*;q=0", False),
        ("identity;q=1, gzip;q=0.5", False),
        ("gzip;q=", False),
        ("gzip;q=nan", False),
        ("gzip;q=-1", False),
        ("gzipped", False),
    ],
)
def test_an_answer_is_compressed_only_for_who_accepts_that(accept_encoding, gzip):
    assert accepts_gzip(accept_encoding) is gzip


def test_a_media_type_of_quality_0_is_not_offered():
    refused = "application/openmetrics-text;version=1.0.0;q=0"

    assert wanted_types(f"{refused}, text/plain;q=0.3,") == "text/plain;q=0.3"
    assert wanted_types("") == ""


@each("version", ["9.9.9", "abc", "1e999", "", '"', "1.0.0.0"])
def test_a_version_that_there_is_not_is_not_offered(version):
    wanted = f"application/openmetrics-text;version={version}"
    assert wanted_types(f"{wanted}, text/plain;version=0.0.4") == "text/plain;version=0.0.4"
    assert content_type(wanted_types(wanted)) == content_type("")
