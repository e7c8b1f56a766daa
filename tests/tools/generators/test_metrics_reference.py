"""The metrics reference is the catalog's, and the committed copy is fresh."""

from mp_agent.catalog.metrics import METRICS
from tests.docs.pages import ROOT
from tools.generators.metrics_reference import reference_files


def test_every_metric_is_described_once_with_help_and_labels() -> None:
    (text,) = reference_files().values()
    for metric in METRICS:
        assert text.count(f"### `{metric.prometheus_name}`\n") == 1
        section = text.partition(f"### `{metric.prometheus_name}`\n")[2].partition("\n#")[0]
        assert metric.help in section
        assert metric.kind.value in section
        for label in metric.label_names:
            assert f"`{label}`" in section


def test_the_committed_reference_is_fresh() -> None:
    for path, text in reference_files().items():
        assert (ROOT / path).read_text("utf-8") == text, "run `make generate`"
