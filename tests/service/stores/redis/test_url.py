from __future__ import annotations

import pytest

from nsm_core.errors import ConfigError
from service.stores.redis.keys import Keyspace
from service.stores.redis.url import parse_redis_url
from service.stores.sessions.key import SessionKey


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://host", "redis://host:6379"),
        ("redis://host:7000/3", "redis://host:7000/3"),
        ("rediss://u:p%40ss@host", "rediss://host:6379"),
        ("redis://:secret@[::1]:7000", "redis://[::1]:7000"),
        ("redis+sentinel://a,b:1/main", "redis+sentinel://a:26379,b:1/main"),
        ("rediss+sentinel://u:secret@a/main/2?sentinel_password=secret", "rediss+sentinel://a:26379/main/2"),
        ("redis+cluster://a:1,b:2,c:3?prefix=x", "redis+cluster://a:1,b:2,c:3"),
    ],
)
def test_an_address_shows_where_but_not_as_whom(url: str, shown: str) -> None:
    address = parse_redis_url(url)
    assert str(address) == shown
    assert "secret" not in repr(address)
    assert "p@ss" not in repr(address)


def test_every_part_of_a_url_is_read() -> None:
    address = parse_redis_url(
        "rediss+sentinel://us%3Aer:p%40ss@a:1/main/2?sentinel_username=s&sentinel_password=t&prefix=my-1&tls_ca=/ca.pem"
        "&tls_check_hostname=no&max_connections=3&pool_timeout_s=0.5&connect_timeout_s=1&socket_timeout_s=2.5"
    )
    assert (address.username, address.password) == ("us:er", "p@ss")
    assert (address.sentinel_username, address.sentinel_password) == ("s", "t")
    assert (address.service, address.database, address.nodes) == ("main", 2, (("a", 1),))
    assert (address.prefix, address.max_connections) == ("my-1", 3)
    assert (address.pool_timeout_s, address.connect_timeout_s, address.socket_timeout_s) == (0.5, 1.0, 2.5)
    assert (address.is_tls, address.tls_ca, address.tls_check_hostname) == (True, "/ca.pem", False)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("http://secret@host", "scheme must be one of redis, rediss"),
        ("redis://", "host is missing"),
        ("redis://secret@host", "needs a password"),
        ("redis://:@host", "needs a password"),
        ("redis://:secret@host:notaport", "host must look like"),
        ("redis://:secret@a,b", "several hosts"),
        ("redis://:secret@a/x", "number of a database"),
        ("redis://:secret@a/1/2", "number of a database"),
        ("redis+sentinel://:secret@a", "name of the service"),
        ("redis+cluster://:secret@a/1", "no databases"),
        ("redis://:secret@a?max_connections=0", "max_connections must be a number from 1 on"),
        ("redis://:secret@a?socket_timeout_s=nan", "socket_timeout_s must be seconds"),
        ("redis://:secret@a?prefix={x}", "prefix must be letters"),
        ("redis://:secret@a?tls_ca=/x", "unknown option 'tls_ca'"),
        ("redis://:secret@a?timeout=3", "unknown option 'timeout'"),
        ("rediss://:secret@a?tls_check_hostname=maybe", "yes or no"),
        ("redis://:secret@a#b", "%23"),
    ],
)
def test_a_bad_url_is_refused_without_being_repeated(url: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_redis_url(url)
    assert message in str(caught.value)
    assert "NSM_STORE" in str(caught.value)
    assert "secret" not in str(caught.value)


def test_D6_all_keys_of_a_session_have_one_hash_tag() -> None:
    keys = Keyspace("nsm").session(SessionKey("tenant", "}{odd \n* id"))
    tags = {key.partition("{")[2].partition("}")[0] for key in keys.all("nonce")}
    assert len(tags) == 1
    assert all(key.count("{") == key.count("}") == 1 for key in keys.all("nonce"))


def test_L6_keys_of_other_tenants_never_meet() -> None:
    space = Keyspace("nsm")
    names = [("a", "bc"), ("ab", "c"), ("abc", ""), ("a", "b"), ("b", "a")]
    assert len({space.session(SessionKey(*name)).head for name in names}) == len(names)
    assert (
        space.session(SessionKey("a", "x")).head.partition(".")[0]
        == space.session(SessionKey("a", "y")).head.partition(".")[0]
    )
