"""The resource attributes of the node agent; OTEL_RESOURCE_ATTRIBUTES overrides them."""

import os
import socket
import uuid
from collections.abc import Mapping
from pathlib import Path

from opentelemetry.sdk.resources import OTELResourceDetector, Resource

from mp_agent.version import __version__

_NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
_BOOT_ID_FILE = Path("/proc/sys/kernel/random/boot_id")
_POD_VARIABLES = {
    "k8s.namespace.name": ("POD_NAMESPACE", "K8S_NAMESPACE"),
    "k8s.pod.name": ("POD_NAME", "K8S_POD_NAME"),
    "k8s.pod.uid": ("POD_UID", "K8S_POD_UID"),
    "k8s.node.name": ("NODE_NAME", "K8S_NODE_NAME"),
    "k8s.container.name": ("CONTAINER_NAME", "K8S_CONTAINER_NAME"),
}
"""By attribute, the variables that the downward API commonly sets; the first one set wins.

The host name is not used: under hostNetwork it is the node's, and in an indexed Job it lacks the
end of the pod's name. A collector can fill in what is absent, not correct what is wrong.
"""


def make_resource(directory: Path) -> Resource:
    """Return the resource of the node agent that watches `directory`.

    `Resource.create` also asks the detectors of OTEL_EXPERIMENTAL_RESOURCE_DETECTORS.
    """
    pod = kubernetes_attributes(os.environ)
    own: dict[str, str | int] = {
        "service.name": "mp-agent",
        "service.version": __version__,
        "service.instance.id": instance_id(directory),
        "host.name": socket.gethostname(),
        "process.pid": os.getpid(),
        **pod,
    }
    if namespace := pod.get("k8s.namespace.name"):
        # Becomes part of Prometheus' `job`, which separates runs of one name in two namespaces.
        own["service.namespace"] = namespace
    return Resource.create(own).merge(OTELResourceDetector().detect())


def instance_id(directory: Path) -> str:
    """Return an id that is unique to this node agent and its successors in `directory`.

    Counters survive a node agent's restart, so the series of its successor must continue them; the
    boot id and the directory's inode distinguish machines and containers of the same name.
    """
    try:
        place = directory.stat()
        identity = f"{place.st_dev}:{place.st_ino}"
    except OSError:
        identity = str(os.getpid())
    parts = (socket.gethostname(), _read(_BOOT_ID_FILE), str(directory), identity)
    return str(uuid.uuid5(uuid.NAMESPACE_OID, "\n".join(("mp_agent", *parts))))


def kubernetes_attributes(
    variables: Mapping[str, str], namespace_file: Path = _NAMESPACE_FILE
) -> dict[str, str]:
    """Return the attributes of the pod; none outside Kubernetes."""
    if "KUBERNETES_SERVICE_HOST" not in variables:
        return {}
    attributes = {
        attribute: next((variables[name] for name in names if variables.get(name)), "")
        for attribute, names in _POD_VARIABLES.items()
    }
    attributes["k8s.namespace.name"] = attributes["k8s.namespace.name"] or _read(namespace_file)
    return {attribute: value for attribute, value in attributes.items() if value}


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        return ""
