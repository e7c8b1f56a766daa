"""The generated files of the Helm chart: its schema, its table of values, rules and dashboards."""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from grafana.render import marked_dashboards
from mp_agent.alerting.conditions import CONDITIONS
from mp_agent.alerting.durations import DURATIONS
from mp_agent.alerting.links import ALERT_MARK, RUNBOOK_BASE, agent_runbook_url
from mp_agent.alerting.rules import render_rules
from mp_agent.alerting.values import MATCHERS, MarkedValues, values_in_force
from mp_agent.alerting.yaml_text import yaml_text
from mp_agent.catalog.thresholds import THRESHOLDS
from mp_agent.settings import SECRETS, Settings
from mp_agent.version import __version__
from tools.generators.chart_alertmanager import alertmanager_file

ROOT = Path(__file__).parents[2]
CHART = Path("helm/mp-agent")

_DURATION = {"type": "string", "pattern": r"^([0-9]+(ms|s|m|h))+$"}
_DURATION_OR_NONE = {"type": "string", "pattern": r"^([0-9]+(ms|s|m|h))*$"}
_SECONDS = {"anyOf": [{"type": "number", "exclusiveMinimum": 0}, _DURATION]}
_TEXTS = {"type": "object", "additionalProperties": {"type": "string"}}
_TEXT_LIST = {"type": "array", "items": {"type": "string"}}
_NAMESPACE = {"type": "string", "pattern": "^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$"}
_NAME_OR_NONE = {
    "type": "string",
    "pattern": "^([a-z0-9]([a-z0-9-]*[a-z0-9])?)?$",
    # To YAML these are no texts.
    "not": {
        "pattern": "^(0x[0-9a-f]+|0o[0-7]+|[0-9]+(e[0-9]+)?|true|false|yes|no|on|off|y|n|null)$"
    },
}
_LABEL_VALUE = {"type": "string", "pattern": "^([A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?)?$"}
_LABEL = {
    "type": "string",
    "pattern": "^([a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?/)?"
    "[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?$",
}
_LABELS = {
    "type": "object",
    "propertyNames": {"pattern": _LABEL["pattern"]},
    "additionalProperties": _LABEL_VALUE,
}
_IMAGE = {"type": "string", "pattern": "^[A-Za-z0-9][A-Za-z0-9._/:-]*$"}
_TAG_PATTERN = "[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}(@sha256:[0-9a-f]{64})?"
_PULL_POLICY = {"enum": ["Always", "IfNotPresent", "Never"]}
_JOB_LABEL = {"type": "string", "pattern": "^[a-zA-Z0-9]([a-zA-Z0-9_.-]*[a-zA-Z0-9])?$"}
_UID_PREFIX = {"type": "string", "pattern": "^[a-z0-9]([a-z0-9-]{0,22}[a-z0-9])?$"}
"""Grafana takes uids of at most 40 characters."""
_NAMESPACES = {"type": "array", "items": _NAMESPACE, "uniqueItems": True}
_ANY_OBJECT = {"type": "object"}
_EMPTY = {"type": "object", "maxProperties": 0}
_OBJECT_LIST = {"type": "array", "items": {"type": "object"}}
_COUNT = {"type": "integer", "minimum": 0}
_URL = {"type": "string", "pattern": r"^https?://[^\s@]+$"}
"""A URL without user and password, which belong into a secret."""
_NO_URL = {"type": "string", "maxLength": 0}
_PORT_NAME = {"type": "string", "pattern": "^[a-z0-9]([a-z0-9-]{0,13}[a-z0-9])?$"}
_MATCHER_LIST = {"type": "string", "pattern": f"^{MATCHERS}$"}
_ADDRESS_CHARACTER = r"[^\s{}<>\"]"
_CONSTRAINTS = ("type", "const", "enum", "minimum", "exclusiveMinimum", "maximum", "items")
_SEVERITY = {"enum": ["critical", "warning", "info", "off", False]}
"""YAML reads a bare `off` as false."""


def _closed(properties: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": dict(properties), "additionalProperties": False, **more}


def _secret(*more: str) -> dict[str, Any]:
    """Return: empty, or a secret's name and key and what else is needed."""
    names = ("name", "key", *more)
    filled = _closed({name: {"type": "string"} for name in names}, required=list(names))
    return {"anyOf": [_EMPTY, filled]}


def _schema_by_path() -> dict[str, Any]:
    """Return the schemas of values whose default does not show their type, by path."""
    return {
        "nameOverride": _NAME_OR_NONE,
        "fullnameOverride": _NAME_OR_NONE,
        "commonLabels": _LABELS,
        "additionalLabels": _LABELS,
        "customResources": {"enum": ["auto", "true", "false", True, False]},
        "assumeApiVersions": _TEXT_LIST,
        "imagePullSecrets": _OBJECT_LIST,
        "podMonitor.podLabel": _LABEL,
        "podMonitor.podLabelValue": _LABEL_VALUE,
        "podMonitor.namespaces": _NAMESPACES,
        "podMonitor.port": _PORT_NAME,
        "podMonitor.path": {"type": "string", "pattern": "^/"},
        "podMonitor.scheme": {"enum": ["http", "https"]},
        "podMonitor.interval": _DURATION,
        "podMonitor.scrapeTimeout": _DURATION_OR_NONE,
        "podMonitor.jobLabel": _JOB_LABEL,
        "podMonitor.tlsConfig": _ANY_OBJECT,
        "podMonitor.basicAuth": _ANY_OBJECT,
        "podMonitor.relabelings": _OBJECT_LIST,
        "podMonitor.metricRelabelings": _OBJECT_LIST,
        "rules.thresholds": _closed(
            {t.name: {"type": "number", "exclusiveMinimum": 0} for t in THRESHOLDS}
        ),
        "rules.durations": _closed({d.name: _SECONDS for d in DURATIONS}),
        "rules.severities": _closed(
            {
                condition.name: _closed({lv.severity.value: _SEVERITY for lv in condition.levels})
                for condition in CONDITIONS
            }
        ),
        "rules.selectors.series": _MATCHER_LIST,
        "rules.selectors.targets": _MATCHER_LIST,
        "rules.runbookBase": {
            "type": "string",
            "pattern": rf"^(https?://({_ADDRESS_CHARACTER}|\{{alert\}})+)?$",
        },
        "rules.dashboardBase": {
            "type": "string",
            "pattern": f"^(https?://{_ADDRESS_CHARACTER}+)?$",
        },
        "dashboards.label": _LABEL,
        "dashboards.labelValue": _LABEL_VALUE,
        "dashboards.folderAnnotation": _LABEL,
        "dashboards.namespace": _NAME_OR_NONE,
        "dashboards.uidPrefix": _UID_PREFIX,
        "grafanaDashboards.instanceSelector": {
            "type": "object",
            "properties": {"matchLabels": _LABELS},
        },
        "agentSettings.namespaces": _NAMESPACES,
        "agentSettings.name": _NAME_OR_NONE,
        "agentSettings.settings": _closed(dict(_settings())),
        "alertmanagerConfig.slack": _secret("channel"),
        "alertmanagerConfig.pagerduty": _secret(),
        "alertmanagerConfig.webhook": {
            "anyOf": [*_secret()["anyOf"], _closed({"url": _URL}, required=["url"])]
        },
        "alertmanagerConfig.repeatInterval": _DURATION,
        "scrapeConfig.httpSdUrls": {"type": "array", "items": _URL},
        "scrapeConfig.fileSdFiles": _TEXT_LIST,
        "scrapeConfig.interval": _DURATION,
        "scrapeConfig.tlsConfig": _ANY_OBJECT,
        "scrapeConfig.basicAuth": _ANY_OBJECT,
        "scrapeConfig.relabelings": _OBJECT_LIST,
        "networkPolicy.namespaces": _NAMESPACES,
        "networkPolicy.prometheusNamespace": _NAMESPACE,
        "networkPolicy.prometheusPodLabels": _LABELS,
        "collector.image.repository": _IMAGE,
        "collector.image.tag": {"type": "string", "pattern": f"^{_TAG_PATTERN}$"},
        "collector.image.pullPolicy": _PULL_POLICY,
        "collector.remoteWriteUrl": {"anyOf": [_NO_URL, _URL]},
        "collector.remoteWriteHeaders": _TEXTS,
        "collector.envFrom": _OBJECT_LIST,
        "collector.resources": _ANY_OBJECT,
        "collector.nodeSelector": _LABELS,
        "collector.tolerations": _OBJECT_LIST,
        "image.repository": _IMAGE,
        "image.tag": {"type": "string", "pattern": f"^({_TAG_PATTERN})?$"},
        "image.pullPolicy": _PULL_POLICY,
        "sidecar.env": _OBJECT_LIST,
        "sidecar.envFrom": _OBJECT_LIST,
        "sidecar.volumes": _OBJECT_LIST,
        "sidecar.volumeMounts": _OBJECT_LIST,
        "sidecar.resources": _ANY_OBJECT,
        "tests.prometheusUrl": {"anyOf": [_NO_URL, _URL]},
        "tests.resources": _ANY_OBJECT,
    }


def _settings() -> Iterator[tuple[str, Any]]:
    """Yield the agents' settings with what each takes; a secret is no value of the chart."""
    for name, known in Settings.model_json_schema()["properties"].items():
        if name == "port":
            # Pods declare the port by its number, so that it cannot be any free one.
            yield name, {**_setting(known), "minimum": 1}
        elif name not in SECRETS:
            yield name, _setting(known)


def _setting(known: Mapping[str, Any]) -> dict[str, Any]:
    kinds = [one for one in known.get("anyOf", [known]) if one.get("type") != "null"]
    if len(kinds) > 1:
        return {"anyOf": [_setting(one) for one in kinds]}
    (kind,) = kinds
    schema = {word: kind[word] for word in _CONSTRAINTS if word in kind}
    if kind.get("format") == "path":
        return {**schema, "pattern": "^/"}
    if schema == {"type": "string"}:
        # A name such as 2024 is no text in YAML.
        return {"type": ["string", "number"]}
    return schema


def values_schema() -> str:
    """Return values.schema.json: closed objects, typed by the defaults and by what is known."""
    values = yaml.safe_load((ROOT / CHART / "values.yaml").read_text(encoding="utf-8"))
    known = _schema_by_path()
    schema = _inferred(values, "", known)
    # Set by Helm for every chart that is a dependency of another.
    schema["properties"]["global"] = _ANY_OBJECT
    if known:
        raise SystemExit(f"values.yaml has no {', '.join(sorted(known))}")
    document = {"$schema": "http://json-schema.org/draft-07/schema#", **schema}
    return json.dumps(document, indent=2) + "\n"


def _inferred(value: Any, path: str, known: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a default value; takes out of `known` what it uses."""
    if path in known:
        return dict(known.pop(path))
    match value:
        case bool():
            return {"type": "boolean"}
        case int():
            return dict(_COUNT)
        case str():
            return {"type": "string"}
        case dict() if value:
            prefix = f"{path}." if path else ""
            # Helm leaves out what is null: an empty value may be absent, no other may.
            required = [
                name
                for name, item in value.items()
                if item not in ("", [], {})
                and not (isinstance(item, dict) and prefix + name in known)
            ]
            return _closed(
                {name: _inferred(item, prefix + name, known) for name, item in value.items()},
                required=required,
            )
    raise SystemExit(
        f"values.yaml: the type of {path} is unknown; declare it in tools/generators/chart.py"
    )


_MARK = re.compile(r"@(\w+(?:\+\w+)*#?)@")
_VALUE = re.compile(r"^(?P<indent> *)(?P<name>[A-Za-z]+):(?P<default>.*)$")


def values_table() -> str:
    """Return the table of values, from the comments of values.yaml."""
    lines = ["| value | default | what it does |", "| --- | --- | --- |"]
    path: list[str] = []
    comment = ""
    text = (ROOT / CHART / "values.yaml").read_text(encoding="utf-8")
    values = yaml.safe_load(text)
    for line in text.splitlines():
        if line.strip().startswith("# -- "):
            comment = line.strip().removeprefix("# -- ")
        elif found := _VALUE.match(line):
            path[len(found["indent"]) // 2 :] = [found["name"]]
            if comment:
                default = json.dumps(_look_up(values, path))
                lines.append(f"| `{'.'.join(path)}` | `{default}` | {comment} |")
                comment = ""
    return "\n".join(lines)


def _look_up(values: Any, path: list[str]) -> Any:
    for name in path:
        values = values[name]
    return values


def chart_files() -> Mapping[str, str]:
    """Return the chart's generated files by path from the repository's root."""
    dashboards = {
        f"{CHART}/files/dashboards/{name}": _compact(text)
        for name, text in marked_dashboards().items()
    }
    readme = (ROOT / CHART / "README.md").read_text(encoding="utf-8")
    return {
        f"{CHART}/Chart.yaml": chart_metadata(),
        f"{CHART}/values.schema.json": values_schema(),
        f"{CHART}/files/rules.yaml": marked_rules(),
        f"{CHART}/files/alertmanager.yaml": alertmanager_file(),
        f"{CHART}/README.md": _with_table(readme, "values", values_table()),
        **dashboards,
    }


def marked_rules() -> str:
    """Return files/rules.yaml: the rules with marks for numbers, and the defaults of the marks."""
    defaults = values_in_force()
    marked = MarkedValues(
        limits=defaults.limits,
        seconds=defaults.seconds,
        selectors={name: f"@{name}_selector@" for name in defaults.selectors},
    )
    rules = render_rules(
        marked,
        heading="Filled in by templates/_rules.tpl.",
        runbook_base="@runbook_base@",
        dashboard_base="@dashboard_base@",
    )
    return yaml_text(
        {
            "thresholds": {t.name: defaults.bound_text(t) for t in THRESHOLDS},
            "durations": {d.name: defaults.seconds[d.name] for d in DURATIONS},
            "below": {t.name: t.below for t in THRESHOLDS if t.below},
            "shorter": {d.name: d.below for d in DURATIONS if d.below},
            "shares": [t.name for t in THRESHOLDS if t.unit == "1"],
            "targetsSelector": defaults.selectors["targets"],
            "runbookBase": RUNBOOK_BASE,
            "agentRunbook": marked.fill(agent_runbook_url(ALERT_MARK)),
            "marks": sorted(set(_MARK.findall(rules))),
            "rules": rules,
        },
        "Generated by `make generate` from the conditions catalog; do not edit.",
    )


def chart_metadata() -> str:
    """Return Chart.yaml with the package's version."""
    text = (ROOT / CHART / "Chart.yaml").read_text(encoding="utf-8")
    return re.sub(r"(?m)^(version|appVersion): .*$", rf"\1: {__version__}", text)


def _with_table(text: str, name: str, table: str) -> str:
    """Return `text` with `table` between its marks `<!-- NAME:begin (generated) -->` and end."""
    begin, end = f"<!-- {name}:begin (generated) -->", f"<!-- {name}:end -->"
    before, found, rest = text.partition(begin)
    if not found:
        raise SystemExit(f"mark {begin} is missing")
    after = rest.partition(end)[2]
    return f"{before}{begin}\n{table}\n{end}{after}"


def _compact(dashboard: str) -> str:
    """Return a dashboard without indentation: an object of Kubernetes may not be large."""
    return json.dumps(json.loads(dashboard), separators=(",", ":"), sort_keys=True) + "\n"
