"""Renders the chart with Helm's own engine."""

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from helm_python import Chart

ROOT = Path(__file__).parents[2]
CHART = ROOT / "helm" / "mp-agent"
VALUES = Path(__file__).parent / "values"
NOTES = "NOTES.txt"
NAMESPACES = ("monitoring", "training", "research")
"""Of the release and of the jobs in the values files."""

Object = dict[str, Any]


def values_file(name: str) -> dict[str, Any]:
    """Return one of the values files of the test matrix."""
    loaded = yaml.safe_load((VALUES / f"{name}.yaml").read_text(encoding="utf-8"))
    return dict(loaded or {})


def texts(
    values: Mapping[str, Any] | None = None, *, release: str = "demo", namespace: str = "monitoring"
) -> dict[str, str]:
    """Return what each template gives, by its file's name."""
    rendered = Chart.load(CHART).render(dict(values or {}), name=release, namespace=namespace)
    return {path.partition("/templates/")[2]: text for path, text in rendered.items()}


def objects(values: Mapping[str, Any] | None = None, **release: str) -> list[Object]:
    """Return all objects of a rendering, in the order of the templates."""
    return [
        document
        for name, text in sorted(texts(values, **release).items())
        if name.endswith(".yaml")
        for document in yaml.load_all(text, yaml.CSafeLoader)
        if document
    ]


@cache
def objects_of(name: str) -> list[Object]:
    """Return the objects of one of the values files; they are shared, so leave them as they are."""
    return objects(values_file(name))


def of_kind(rendered: list[Object], kind: str) -> list[Object]:
    """Return the objects of one kind."""
    return [item for item in rendered if item["kind"] == kind]
