"""Custom resources of the chart are what their operators' definitions say."""

import copy

import jsonschema
import pytest

from tests.helm.definitions import validate
from tests.helm.rendering import objects_of
from tests.helm.test_chart import MATRIX, is_custom


@pytest.mark.parametrize("name", MATRIX)
def test_custom_resources_fit_their_definitions(name: str) -> None:
    for item in filter(is_custom, objects_of(name)):
        validate(item)


def test_everything_on_makes_every_kind_of_custom_resource() -> None:
    kinds = {item["kind"] for item in filter(is_custom, objects_of("everything"))}
    assert kinds >= {"PodMonitor", "PrometheusRule", "AlertmanagerConfig", "ScrapeConfig"}


def test_a_misspelt_field_would_be_noticed() -> None:
    (monitor,) = (item for item in objects_of("default") if item["kind"] == "PodMonitor")
    broken = copy.deepcopy(monitor)
    broken["spec"]["podMetricsEndpoints"][0]["intervall"] = "15s"
    with pytest.raises(jsonschema.ValidationError, match="intervall"):
        validate(broken)
