"""Validates custom resources against their published definitions, unknown fields included."""

import os
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

VARIABLE = "MP_AGENT_CRD_DIR"

Schema = dict[str, Any]


class _Loader(yaml.CSafeLoader):
    """Reads a plain `=` as a text, as Kubernetes does; YAML 1.1 gives it its own type."""


def _text(loader: _Loader, node: yaml.ScalarNode) -> str:
    return str(loader.construct_scalar(node))


_Loader.add_constructor("tag:yaml.org,2002:value", _text)


@cache
def definitions() -> Mapping[tuple[str, str], Schema]:
    """Return the schemas by apiVersion and kind; skips the test when there is no folder of them."""
    folder = os.environ.get(VARIABLE)
    if not folder:
        pytest.skip(f"{VARIABLE} names no folder of custom resource definitions")
    found: dict[tuple[str, str], Schema] = {}
    for path in sorted(Path(folder).glob("*.yaml")):
        for document in yaml.load_all(path.read_text(encoding="utf-8"), _Loader):
            if isinstance(document, dict) and document.get("kind") == "CustomResourceDefinition":
                spec = document["spec"]
                for version in spec["versions"]:
                    key = (f"{spec['group']}/{version['name']}", spec["names"]["kind"])
                    found[key] = _closed(version["schema"]["openAPIV3Schema"])
    assert found, f"no definitions in {folder}"
    return found


def validate(item: Mapping[str, Any]) -> None:
    """Raise jsonschema.ValidationError when a custom resource is not what its definition says."""
    schema = definitions()[item["apiVersion"], item["kind"]]
    jsonschema.Draft7Validator(schema).validate(item)


def _closed(schema: Any) -> Any:
    """Return a schema that refuses fields which the API server would drop without a word."""
    if isinstance(schema, list):
        return [_closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {name: _closed(item) for name, item in schema.items()}
    is_open = schema.get("x-kubernetes-preserve-unknown-fields")
    if schema.get("type") == "object" and "properties" in schema and not is_open:
        closed.setdefault("additionalProperties", False)
    if schema.get("x-kubernetes-int-or-string"):
        closed.pop("type", None)
    return closed
