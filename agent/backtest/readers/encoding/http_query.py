"""Questions to the HTTP API of a Prometheus."""

import base64
import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlencode, urlsplit, urlunsplit

from mp_agent.errors import LogError

TIMEOUT_SECONDS = 60.0
_BODY_BYTES_MAX = 1 << 30


def ask(source: str, path: str, parameters: Mapping[str, object]) -> Any:
    """Return `data` of the answer. Raises LogError, which shows no password of the address."""
    parts = urlsplit(source)
    address = urlunsplit(
        (parts.scheme, parts.netloc.rpartition("@")[2], parts.path.rstrip("/"), "", "")
    )
    url = f"{address}/api/v1/{path}"
    body = urlencode(parameters).encode()
    request = (
        urllib.request.Request(url, data=body)
        if path.startswith("query")
        else urllib.request.Request(f"{url}?{body.decode()}")
    )
    if parts.username:
        pair = f"{parts.username}:{parts.password or ''}".encode()
        request.add_header("Authorization", f"Basic {base64.b64encode(pair).decode()}")
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS) as response:
            answer = json.loads(response.read(_BODY_BYTES_MAX))
    except urllib.error.HTTPError as error:
        with error:
            raise LogError(f"status {error.code}: {_problem(error.read(4096))}") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", None) or getattr(error, "strerror", None) or error
        raise LogError(f"cannot be asked: {reason}") from None
    if not isinstance(answer, Mapping) or "data" not in answer:
        raise LogError("the answer is not Prometheus'")
    return answer["data"]


def _problem(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"])
    except (ValueError, KeyError, TypeError):
        return body[:100].decode("utf-8", "replace")
