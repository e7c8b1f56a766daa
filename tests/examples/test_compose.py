"""The compose file's configuration is what its servers take, and its mounts exist."""

import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
COMPOSE = ROOT / "examples" / "compose"
SERVICES = yaml.safe_load((COMPOSE / "compose.yaml").read_text("utf-8"))["services"]


def mounts() -> list[tuple[str, str]]:
    return [
        (source, target)
        for service in SERVICES.values()
        for source, target, _ in (text.split(":") for text in service.get("volumes", []))
    ]


def test_every_mounted_file_exists_and_is_mounted_read_only() -> None:
    assert mounts()
    for service in SERVICES.values():
        assert all(text.endswith(":ro") for text in service.get("volumes", []))
    for source, _ in mounts():
        assert (COMPOSE / source).exists(), source


def test_the_image_of_the_job_installs_torch_which_the_package_alone_does_not() -> None:
    dockerfile = (COMPOSE / "Dockerfile.job").read_text("utf-8")
    assert re.search(r"^RUN pip install .* '\.\[torch\]'$", dockerfile, re.MULTILINE)


def test_images_are_pinned() -> None:
    for service in SERVICES.values():
        if "image" in service:
            assert service["image"].rpartition(":")[2][0] in "v0123456789"


@pytest.mark.e2e
def test_prometheus_and_alertmanager_take_their_configuration(
    server: Callable[[str], Path], tmp_path: Path
) -> None:
    for name in ("prometheus.yml", "../../alerting/rendered/mp_agent.rules.yaml"):
        (tmp_path / Path(name).name).write_bytes((COMPOSE / name).read_bytes())
    subprocess.run(
        [server("promtool"), "check", "config", tmp_path / "prometheus.yml"],
        check=True,
        capture_output=True,
    )
    subprocess.run(
        [server("amtool"), "check-config", COMPOSE / "alertmanager.yml"],
        check=True,
        capture_output=True,
    )


def test_grafana_finds_its_datasource_and_the_dashboards_where_they_are_mounted() -> None:
    provisioning = ROOT / "grafana" / "provisioning"
    (source,) = yaml.safe_load((provisioning / "datasources/prometheus.yaml").read_text("utf-8"))[
        "datasources"
    ]
    assert source["url"] == "http://prometheus:9090"
    assert "prometheus" in SERVICES
    (provider,) = yaml.safe_load((provisioning / "dashboards/mp-agent.yaml").read_text("utf-8"))[
        "providers"
    ]
    assert provider["options"]["path"] in {target for _, target in mounts()}


def test_the_job_is_scraped_where_it_listens() -> None:
    configuration = yaml.safe_load((COMPOSE / "prometheus.yml").read_text("utf-8"))
    (job,) = configuration["scrape_configs"]
    assert job["static_configs"] == [{"targets": ["job:9464"]}]
    assert "127.0.0.1:9464:9464" in SERVICES["job"]["ports"]


def test_what_asks_for_no_password_answers_this_machine_alone() -> None:
    ports = [port for service in SERVICES.values() for port in service["ports"]]
    assert all(port.startswith("127.0.0.1:") for port in ports)


def test_grafana_opens_with_a_dashboard_that_is_mounted() -> None:
    home = Path(SERVICES["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"])
    ((source, _),) = (mount for mount in mounts() if mount[1] == str(home.parent))
    assert (COMPOSE / source / home.name).is_file()
