"""The dashboards of a release have its limits and lead to its runbooks."""

import json
from typing import Any

import pytest

from mp_agent.catalog.thresholds import resolve
from mp_agent.exporters.dashboards import dashboards
from tests.helm.rendering import objects, of_kind


@pytest.mark.parametrize(
    "rules",
    [
        {
            "thresholds": {"grad_norm_high": 50, "grad_norm_vanished": 0.0000001},
            "runbookBase": "https://wiki.example.com/runbooks/",
        },
        {"runbookBase": "https://wiki.example.com/?page={alert}"},
    ],
)
def test_they_are_those_that_the_command_writes(rules: dict[str, Any]) -> None:
    expected = dashboards(resolve(rules.get("thresholds", {})), rules["runbookBase"])
    carried = {
        file: json.loads(text)
        for item in of_kind(objects({"rules": rules}), "ConfigMap")
        if item["metadata"]["labels"].get("grafana_dashboard") == "1"
        for file, text in item["data"].items()
    }
    assert carried == {file: json.loads(text) for file, text in expected.items()}
