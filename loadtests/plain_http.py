"""Single calls to a server outside of the load: to write scripts, to ask whether it is there."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from loadtests.errors import RunError

REQUEST_S = 600.0
HEALTH_S = 10.0
# The load itself goes straight to the servers, so nothing here may go through HTTP_PROXY
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def server_url(text: str) -> str:
    """`http://host:port`, without a slash at its end. Raises ValueError for TLS and paths, which belong to a proxy."""
    parts = urlsplit(text.rstrip("/"))
    has_more = bool(parts.path or parts.query or parts.fragment or parts.username)
    if parts.scheme != "http" or not parts.hostname or has_more or parts.port == 0:
        raise ValueError(f"{text!r} must be http://HOST or http://HOST:PORT, without a path")
    return text.rstrip("/")


def call(
    url: str, method: str, path: str, body: Mapping[str, Any] | None = None, *, timeout_s: float = REQUEST_S
) -> dict[str, Any]:
    """The JSON object that a server answers. Raises RunError when it refuses, breaks off or cannot be reached."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url + path, data, {"content-type": "application/json"}, method=method)
    try:
        with _OPENER.open(request, timeout=timeout_s) as response:
            answer = json.loads(response.read())
    except urllib.error.HTTPError as error:
        with error:
            text = error.read().decode(errors="replace")[:500]
        raise RunError(f"{url} refused {method} {path}: {error.code} {text}") from error
    except urllib.error.URLError as error:
        raise RunError(f"{url} cannot be reached: {error.reason}") from error
    except ValueError as error:
        raise RunError(f"{url} answered {method} {path} with something other than JSON") from error
    except (OSError, http.client.HTTPException) as error:
        reason = str(error) or type(error).__name__
        raise RunError(f"{url} broke off during {method} {path}: {reason}") from error
    if not isinstance(answer, dict):
        raise RunError(f"{url} answered {method} {path} with {type(answer).__name__}, not with a JSON object")
    return answer


def check_ready(url: str) -> None:
    """Raises RunError for a server that is not there, or not ready for requests."""
    call(url, "GET", "/health/ready", timeout_s=HEALTH_S)


def is_alive(url: str) -> bool:
    """Whether the server still answers, whatever its load."""
    try:
        call(url, "GET", "/health/live", timeout_s=HEALTH_S)
    except RunError:
        return False
    return True
