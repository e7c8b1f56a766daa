"""Requests to node agents, each bounded in time and size."""

import socket

from mp_agent.errors import SettingError, SourceError
from mp_agent.inputs.addresses import address_of, basic_authorization, is_loopback
from mp_agent.inputs.http import Answer, send
from mp_agent.node.tls import client_tls
from mp_agent.settings import Settings

TIMEOUT_SECONDS = 5.0
_CONNECT_SECONDS = 3.0
_REFUSED_BY_PROXY = (403, 407, 502, 503, 504)
"""Statuses of a proxy that does not reach, or does not permit, a server."""


def fetch_from_agent(url: str, settings: Settings, query: str = "") -> Answer:
    """GET from a node agent, with the certificates and the password of the settings.

    User and password of the URL, if it has them, come first.
    """
    password = settings.basic_auth_password.get_secret_value()
    try:
        address = address_of(url)
        tls = client_tls(settings) if address.url.startswith("https:") else None
    except (SettingError, SourceError) as error:
        return Answer(0, problem=str(error))
    authorization = address.authorization
    if not authorization and settings.basic_auth_user and password:
        authorization = basic_authorization(settings.basic_auth_user.encode(), password.encode())
    if tls is not None:
        # The certificate is issued for the name by which others reach this machine.
        tls.check_hostname = not is_loopback(address.host)
    # Proxies of the environment are ignored: they may not reach the job's own network.
    return send(address, query=query, seconds=TIMEOUT_SECONDS, authorization=authorization, tls=tls)


def proxy_problem(url: str, proxy: str) -> str:
    """Return why a proxy does not reach a server; "" when that answers, whatever it says."""
    answer = send(address_of(url), seconds=TIMEOUT_SECONDS, proxy=proxy)
    return answer.problem if answer.status in (0, *_REFUSED_BY_PROXY) else ""


def connection_problem(host: str, port: int) -> str:
    """Return why a TCP connection fails; "" when one is established."""
    try:
        socket.create_connection((host, port), timeout=_CONNECT_SECONDS).close()
    except OSError as error:
        return error.strerror or str(error)
    return ""
