import os
import socket

from mp_agent.exporters.otlp.events import instance_id, kubernetes_attributes, make_resource
from mp_agent.version import __version__


def test_the_resource_says_who_sends(tmp_path, monkeypatch):
    for name in list(os.environ):
        if name.startswith(("OTEL_", "KUBERNETES_")):
            monkeypatch.delenv(name)
    attributes = make_resource(tmp_path).attributes

    assert attributes["service.name"] == "mp-agent"
    assert attributes["service.version"] == __version__
    assert attributes["host.name"] == socket.gethostname()
    assert attributes["process.pid"] == os.getpid()
    assert attributes["service.instance.id"] == instance_id(tmp_path)
    assert attributes["telemetry.sdk.language"] == "python"


def test_the_environments_attributes_win(tmp_path, monkeypatch):
    monkeypatch.setenv("OTEL_SERVICE_NAME", "training")
    monkeypatch.setenv(
        "OTEL_RESOURCE_ATTRIBUTES",
        "service.name=other,service.namespace=ml,host.name=box,service.instance.id=i%201",
    )
    attributes = make_resource(tmp_path).attributes

    assert attributes["service.name"] == "training"
    assert attributes["service.namespace"] == "ml"
    assert attributes["host.name"] == "box"
    assert attributes["service.instance.id"] == "i 1"


def test_runs_of_one_name_in_two_namespaces_are_of_two_services(tmp_path, monkeypatch):
    monkeypatch.delenv("OTEL_RESOURCE_ATTRIBUTES", raising=False)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    monkeypatch.setenv("POD_NAMESPACE", "team-a")

    assert make_resource(tmp_path).attributes["service.namespace"] == "team-a"


def test_an_instance_is_its_directory_and_outlives_the_process(tmp_path):
    first, second = tmp_path / "a", tmp_path / "b"
    first.mkdir()
    second.mkdir()
    assert instance_id(first) == instance_id(first) != instance_id(second)
    (first / "agent.lock").touch()
    before = instance_id(first)
    (first / "agent.lock").unlink()
    first.rmdir()
    (tmp_path / "takes the inode").mkdir()
    first.mkdir()
    assert instance_id(first) != before


def test_nothing_is_said_of_kubernetes_outside_it():
    assert kubernetes_attributes({"HOSTNAME": "box", "POD_NAME": "x"}) == {}


def test_a_pod_is_identified_by_the_downward_api_and_its_files_not_by_its_host_name(tmp_path):
    namespace = tmp_path / "namespace"
    namespace.write_text("training\n")
    inside = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "HOSTNAME": "llama-0"}

    assert kubernetes_attributes(inside, namespace) == {"k8s.namespace.name": "training"}
    downward = {"POD_NAME": "p", "POD_NAMESPACE": "n", "POD_UID": "u", "NODE_NAME": "node-1"}
    assert kubernetes_attributes({**inside, **downward}, tmp_path / "none") == {
        "k8s.namespace.name": "n",
        "k8s.pod.name": "p",
        "k8s.pod.uid": "u",
        "k8s.node.name": "node-1",
    }
