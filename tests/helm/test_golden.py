"""The whole rendering, as committed, so that a change of it is a change that someone read.

`UPDATE_GOLDEN=1 python -m pytest tests/helm/test_golden.py` writes the files again. Rules,
dashboards and messages have their own tests and are listed here by name alone.
"""

import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.helm.rendering import NOTES, Object, objects, texts, values_file

GOLDEN = Path(__file__).parent / "golden"


def _without_bulk(item: Object) -> Object:
    """Return an object without what is generated elsewhere."""
    if item["kind"] == "PrometheusRule":
        names = [group["name"] for group in item["spec"]["groups"]]
        return {**item, "spec": {"groups": names}}
    if item["kind"] == "GrafanaDashboard":
        return {**item, "spec": {**item["spec"], "json": "…"}}
    if item["kind"] == "AlertmanagerConfig":
        return dict(_without_messages(item))
    if item["metadata"]["labels"].get("grafana_dashboard"):
        return {**item, "data": {name: "…" for name in item["data"]}}
    return item


def _without_messages(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_messages(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_without_messages(item) for item in value]
    return "…" if isinstance(value, str) and "{{" in value else value


def _text(values: dict[str, Any]) -> str:
    documents = [
        yaml.safe_dump(_without_bulk(item), sort_keys=False, allow_unicode=True)
        for item in objects(values)
    ]
    return "---\n".join((*documents, yaml.safe_dump({"NOTES": texts(values)[NOTES]})))


@pytest.mark.parametrize("name", ["default", "everything"])
def test_the_rendering_is_the_committed_one(name: str) -> None:
    path, text = GOLDEN / f"{name}.yaml", _text(values_file(name))
    if os.environ.get("UPDATE_GOLDEN"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    assert path.read_text(encoding="utf-8") == text
