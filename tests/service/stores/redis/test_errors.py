"""What clients and logs are told of a Redis that fails: the cause, and nothing that Redis said."""

from __future__ import annotations

import asyncio
import socket
import ssl

import pytest
from redis import exceptions
from redis.asyncio.sentinel import MasterNotFoundError

from nsm_core.errors import NsmError, StorageFull, StoreUnavailable
from service.stores.redis.errors import translate


def caused_by(error: BaseException, cause: BaseException) -> BaseException:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "retry_s", "words"),
    [
        (caused_by(exceptions.ConnectionError("Error 111"), ConnectionRefusedError(111, "h")), 1, "connection refused"),
        (caused_by(exceptions.ConnectionError("Error -2"), socket.gaierror(-2, "h")), 1, "no address is known"),
        (caused_by(exceptions.ConnectionError("Error 1"), ssl.SSLError(1, "h")), 1, "TLS failed"),
        (caused_by(exceptions.TimeoutError("Timeout reading from h"), TimeoutError()), 1, "no answer in time"),
        (asyncio.IncompleteReadError(b"", 1), 1, "the connection broke"),
        (exceptions.ConnectionError("Connection closed by server."), 1, "cannot be reached (ConnectionError)"),
        (exceptions.ReadOnlyError("You can't write against a read only replica."), 1, "a read-only replica"),
        (exceptions.ResponseError("READONLY You can't write"), 1, "a read-only replica"),
        (exceptions.ResponseError("LOADING Redis is loading"), 1, "still loads its data"),
        (exceptions.ClusterDownError("Hash slot not served"), 1, "the cluster is down"),
        (MasterNotFoundError("No master found for 'h'"), 1, "no Sentinel names a master"),
        (exceptions.AuthenticationError("Authentication required."), 60, "asks for a password, and NSM_STORE has none"),
        (exceptions.AuthenticationError("invalid username-password pair"), 60, "refuses the user or the password"),
        (exceptions.ResponseError("WRONGPASS invalid h"), 60, "refuses the user or the password"),
        (exceptions.NoPermissionError("User h has no permissions"), 60, "refuses the user a command or a key (NOPERM)"),
    ],
)
def test_D2_an_unavailable_redis_is_told_with_its_cause(error: BaseException, retry_s: float, words: str) -> None:
    translated = translate(error)
    assert isinstance(translated, StoreUnavailable)
    assert words in str(translated)
    assert translated.retry_after_s == retry_s


NO_CLUSTER = exceptions.ResponseError("This instance has cluster support disabled")
NO_CLUSTER_HERE = exceptions.RedisClusterException("Cluster mode is not enabled on this node")


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (exceptions.ResponseError("unknown command 'SENTINEL', with args: 'h'"), "is no Sentinel: NSM_STORE needs"),
        (exceptions.ResponseError("unknown command 'SET', with args: 'h'"), "a Sentinel needs redis+sentinel://"),
        (
            caused_by(exceptions.RedisClusterException("no node at h"), caused_by(NO_CLUSTER_HERE, NO_CLUSTER)),
            "is no cluster: NSM_STORE needs redis:// in place of redis+cluster://",
        ),
        (exceptions.InvalidResponse('Protocol error, got "h" as reply type byte'), "is no Redis: another kind"),
        (
            caused_by(exceptions.ConnectionError("Error 1"), ssl.SSLError(1, "[SSL: WRONG_VERSION_NUMBER] h")),
            "does not speak TLS: NSM_STORE needs redis in place of rediss",
        ),
    ],
)
def test_D2_another_kind_of_server_is_told_with_the_url_that_it_needs(error: BaseException, words: str) -> None:
    translated = translate(error)
    assert isinstance(translated, StoreUnavailable)
    assert words in str(translated)
    assert translated.retry_after_s == 60


@pytest.mark.parametrize(
    "error",
    [
        caused_by(exceptions.RedisClusterException("no node at h"), exceptions.TimeoutError("Timeout connecting to h")),
        MasterNotFoundError("No master found for 'h'"),
    ],
)
def test_D2_a_server_that_is_silent_to_tls_may_have_none(error: BaseException) -> None:
    hint = "NSM_STORE needs redis in place of rediss"
    assert hint in str(translate(error, is_tls=True))
    assert hint not in str(translate(error))
    assert hint not in str(translate(exceptions.TimeoutError("Timeout reading from h"), is_tls=True))


def test_D2_the_cause_of_a_clusters_error_is_found_within_it() -> None:
    refused = caused_by(exceptions.ConnectionError("Error 111 to 10.0.0.1"), ConnectionRefusedError(111, "10.0.0.1"))
    translated = translate(caused_by(exceptions.RedisClusterException("no node at 10.0.0.1"), refused))
    assert str(translated) == "the session store cannot be reached: connection refused"


@pytest.mark.parametrize(
    "error", [exceptions.OutOfMemoryError("command not allowed"), exceptions.ResponseError("OOM x")]
)
def test_D3_a_full_redis_is_told_as_full(error: Exception) -> None:
    translated: NsmError = translate(error)
    assert isinstance(translated, StorageFull)
    assert "maxmemory" in str(translated)
