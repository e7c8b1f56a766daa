"""TLS, client certificates and basic auth let in whom they should, and say what is missing."""

import asyncio
import base64
import ssl
from pathlib import Path
from typing import Any

import pytest
import trustme
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from mp_agent.errors import SettingError
from mp_agent.node.endpoint import client_tls, server_tls
from mp_agent.node.http.auth import access, basic_auth
from mp_agent.settings import Settings
from tests.subtests import each


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Certificate, key and authority of a server, and a file that holds none of them."""
    folder = tmp_path_factory.mktemp("tls")
    authority = trustme.CA()
    certificate = authority.issue_cert("127.0.0.1")
    names = {name: folder / f"{name}.pem" for name in ("certificate", "key", "authority", "junk")}
    certificate.private_key_pem.write_to_path(names["key"])
    for blob in certificate.cert_chain_pems:
        blob.write_to_path(names["certificate"], append=True)
    authority.cert_pem.write_to_path(names["authority"])
    names["junk"].write_text("not a certificate")
    return names


def test_without_settings_the_port_is_open_and_plain() -> None:
    granted = access(Settings())
    assert granted.tls is None
    assert not granted.requires_password


def test_a_certificate_and_its_key_make_tls_of_at_least_1_2(files: dict[str, Path]) -> None:
    context = server_tls(Settings(tls_certificate=files["certificate"], tls_key=files["key"]))
    assert context is not None
    assert context.minimum_version >= ssl.TLSVersion.TLSv1_2
    assert context.verify_mode is ssl.CERT_NONE


def test_with_an_authority_for_clients_a_certificate_is_required(files: dict[str, Path]) -> None:
    context = server_tls(
        Settings(
            tls_certificate=files["certificate"],
            tls_key=files["key"],
            tls_client_ca=files["authority"],
        )
    )
    assert context is not None
    assert context.verify_mode is ssl.CERT_REQUIRED


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"tls_certificate": "certificate"}, "tls_key"),
        ({"tls_key": "key"}, "tls_certificate"),
        ({"tls_client_ca": "authority"}, "tls_certificate"),
        ({"tls_certificate": "junk", "tls_key": "key"}, "tls_certificate"),
        ({"tls_certificate": "certificate", "tls_key": "certificate"}, "tls_key"),
    ],
)
def test_half_a_set_and_files_that_are_none_are_refused_by_name(
    given: dict[str, str], named: str, files: dict[str, Path]
) -> None:
    chosen: dict[str, Any] = {setting: files[name] for setting, name in given.items()}
    settings = Settings(**chosen)
    with pytest.raises(SettingError, match=named):
        server_tls(settings)


def test_a_file_that_is_not_there_is_named(files: dict[str, Path]) -> None:
    missing = files["junk"].parent / "nowhere.pem"
    with pytest.raises(SettingError, match=r"nowhere\.pem.*No such file"):
        server_tls(Settings(tls_certificate=missing, tls_key=files["key"]))
    with pytest.raises(SettingError, match=r"tls_ca .*junk\.pem"):
        client_tls(Settings(tls_ca=files["junk"]))


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        (Settings(basic_auth_user="scraper"), "basic_auth_password"),
        (Settings(basic_auth_password="secret"), "basic_auth_user"),
    ],
)
def test_a_user_without_password_or_the_reverse_is_refused(settings: Settings, named: str) -> None:
    with pytest.raises(SettingError, match=named):
        basic_auth(settings)


def test_a_password_shows_nowhere() -> None:
    settings = Settings(basic_auth_user="scraper", basic_auth_password="hunter2")
    assert "hunter2" not in repr(settings)
    assert "hunter2" not in str(settings.model_dump(mode="json"))


def _header(user: str, password: str) -> dict[str, str]:
    text = base64.b64encode(f"{user}:{password}".encode()).decode()
    return {"Authorization": f"Basic {text}"}


async def _answer(path: str, headers: dict[str, str]) -> int:
    async def ok(request: web.Request) -> web.Response:
        return web.Response()

    settings = Settings(basic_auth_user="scraper", basic_auth_password="pässwörd")
    app = web.Application(middlewares=access(settings).middlewares)
    app.router.add_get("/metrics", ok)
    app.router.add_get("/healthz", ok)
    async with TestClient(TestServer(app)) as client:
        response = await client.get(path, headers=headers)
        if response.status == 401:
            assert response.headers["WWW-Authenticate"].startswith("Basic ")
        return response.status


@each(
    ("path", "headers", "status"),
    [
        ("/metrics", {}, 401),
        ("/metrics", _header("scraper", "wrong"), 401),
        ("/metrics", _header("other", "pässwörd"), 401),
        ("/metrics", {"Authorization": "Bearer x"}, 401),
        ("/metrics", _header("scraper", "pässwörd"), 200),
        ("/nothing/here", {}, 401),
        ("/healthz", {}, 200),
    ],
)
def test_only_who_knows_user_and_password_gets_in_and_probes_of_health_need_none(
    path: str, headers: dict[str, str], status: int
) -> None:
    assert asyncio.run(_answer(path, headers)) == status
