"""The pod security standard "restricted", as far as a container's and a pod's own fields go."""

from collections.abc import Iterator, Mapping
from typing import Any

Spec = Mapping[str, Any]


def violations(pod: Spec) -> list[str]:
    """Return what the standard would refuse in a pod's spec, and an unneeded token."""
    return [*_of_the_pod(pod), *(text for one in _containers(pod) for text in _of_one(one, pod))]


def pod_specs(value: Any) -> Iterator[Spec]:
    """Yield the spec of every pod and pod template in an object, however deep."""
    if isinstance(value, dict):
        if "containers" in value:
            yield value
        for item in value.values():
            yield from pod_specs(item)
    elif isinstance(value, list):
        for item in value:
            yield from pod_specs(item)


def _containers(pod: Spec) -> list[Spec]:
    return [*pod["containers"], *pod.get("initContainers", [])]


def _of_the_pod(pod: Spec) -> Iterator[str]:
    for name in ("hostNetwork", "hostPID", "hostIPC"):
        if pod.get(name):
            yield name
    if any("hostPath" in volume for volume in pod.get("volumes", [])):
        yield "hostPath"
    if pod.get("automountServiceAccountToken", True) and not pod.get("serviceAccountName"):
        yield "automountServiceAccountToken"


def _of_one(container: Spec, pod: Spec) -> Iterator[str]:
    own = container.get("securityContext", {})
    wanted = {
        "runAsNonRoot": True,
        "seccompProfile": {"type": "RuntimeDefault"},
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
    }
    for name, value in wanted.items():
        if own.get(name, pod.get("securityContext", {}).get(name)) != value:
            yield f"{container['name']}: {name}"
    if own.get("privileged"):
        yield f"{container['name']}: privileged"
