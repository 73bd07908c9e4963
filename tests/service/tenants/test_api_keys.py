from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from nsm_core.errors import ConfigError
from service.tenants.api_keys import KEY, ApiKey, KeyFile, digest_of, new_key
from tests.support.tenants import StillClock, make_key, write_keys

DIGEST = "0" * 64


def test_a_new_key_is_random_and_shaped_like_a_key() -> None:
    keys = [new_key() for _ in range(100)]
    assert len({text for text, _ in keys}) == len({key_id for _, key_id in keys}) == 100
    for text, key_id in keys:
        found = KEY.fullmatch(text)
        assert found is not None
        assert found[1] == key_id


def test_keys_are_found_with_their_tenants_and_limits(tmp_path: Path) -> None:
    old, new, other = make_key("acme"), make_key("acme"), make_key("rival", metrics=True)
    path = write_keys(tmp_path / "keys.toml", old, new, other, acme="max_sessions = 3\nrequests_per_s = 2", rival="")
    keys = KeyFile(path)
    found = [keys.find(key.text) for key in (old, new, other)]
    assert [(key.tenant, key.metrics) for key in found if key] == [("acme", False), ("acme", False), ("rival", True)]
    acme, rival = keys.limits("acme"), keys.limits("rival")
    assert acme is not None
    assert rival is not None
    assert (acme.max_sessions, acme.requests_per_s, acme.max_concurrent) == (3, 2.0, None)
    assert set(rival.model_dump(exclude={"prefix_cache"}).values()) == {None}
    assert rival.prefix_cache
    assert keys.limits("nobody") is None


@pytest.mark.parametrize("change", ["secret", "id", "longer", "shorter", "upper", "digest", "empty", "null"])
def test_what_is_not_exactly_a_key_is_unknown(tmp_path: Path, change: str) -> None:
    key, stranger = make_key("acme"), make_key("acme")
    keys = KeyFile(write_keys(tmp_path / "keys.toml", key, acme=""))
    prefix = key.text.removesuffix(key.secret)
    given = {
        "secret": prefix + stranger.secret,
        "id": stranger.text.removesuffix(stranger.secret) + key.secret,
        "longer": key.text + "A",
        "shorter": key.text[:-1],
        "upper": key.text.upper(),
        "digest": digest_of(key.text),
        "empty": "",
        "null": key.text + "\0",
    }[change]
    assert keys.find(given) is None
    assert keys.find(key.text) is not None


def test_a_file_has_no_key_in_it(tmp_path: Path) -> None:
    key = make_key("acme")
    text = write_keys(tmp_path / "keys.toml", key, acme="").read_text()
    assert key.secret not in text
    assert set(ApiKey.model_fields) == {"id", "tenant", "sha256", "metrics"}


# ---- rotation ------------------------------------------------------------------------------------------------------


def test_keys_are_rotated_without_a_restart(tmp_path: Path) -> None:
    path, clock = tmp_path / "keys.toml", StillClock()
    old, new = make_key("acme"), make_key("acme")
    keys = KeyFile(write_keys(path, old, acme=""), clock=clock)
    write_keys(path, old, new, acme="max_sessions = 1")
    assert keys.find(new.text) is None  # looked at at most once a second
    clock.now += 1.0
    assert keys.find(new.text) is not None
    assert keys.find(old.text) is not None
    limits = keys.limits("acme")
    assert limits is not None
    assert limits.max_sessions == 1
    write_keys(path, new, acme="")
    clock.now += 1.0
    assert keys.find(old.text) is None
    assert keys.find(new.text) is not None


@pytest.mark.parametrize("broken", ["[[keys", "", "keys = []", "gone", "[tenants.acme]", "\xff"])
def test_a_broken_new_file_keeps_the_old_keys_and_is_logged_once(
    tmp_path: Path, broken: str, caplog: pytest.LogCaptureFixture
) -> None:
    path, clock, key = tmp_path / "keys.toml", StillClock(), make_key("acme")
    keys = KeyFile(write_keys(path, key, acme=""), clock=clock)
    if broken == "gone":
        path.unlink()
    else:
        path.write_bytes(broken.encode("latin-1"))
    for _ in range(3):
        clock.now += 1.0
        assert keys.find(key.text) is not None
    errors = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert len(errors) == 1
    assert str(path) in errors[0]
    assert errors[0].endswith("; the keys stay as they were")
    newer = make_key("acme")
    write_keys(path, newer, acme="")
    clock.now += 1.0
    assert keys.find(key.text) is None
    assert keys.find(newer.text) is not None


def test_a_file_behind_a_link_that_is_turned_is_seen(tmp_path: Path) -> None:
    """So does Kubernetes replace a mounted secret."""
    clock, old, new = StillClock(), make_key("acme"), make_key("acme")
    for name, key in (("one", old), ("two", new)):
        write_keys(tmp_path / name, key, acme="")
        os.utime(tmp_path / name, ns=(1, 1))
    link = tmp_path / "keys.toml"
    link.symlink_to("one")
    keys = KeyFile(link, clock=clock)
    (tmp_path / "next").symlink_to("two")
    os.replace(tmp_path / "next", link)
    clock.now += 1.0
    assert keys.find(new.text) is not None
    assert keys.find(old.text) is None


# ---- files that cannot be used -------------------------------------------------------------------------------------

GOOD = f'[tenants.acme]\n[[keys]]\nid = "00112233aabb"\ntenant = "acme"\nsha256 = "{DIGEST}"\n'


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ["keys", "required"]),
        ("[tenants.acme]", ["keys", "required"]),
        ("keys = []\n[tenants.acme]", ["keys must have at least 1 entry"]),
        ("[[keys]\nid", ["not valid TOML", "line 1"]),
        (GOOD.replace("00112233aabb", "short"), ["keys.0.id", "pattern"]),
        (GOOD.replace(DIGEST, "0" * 63), ["keys.0.sha256", "pattern"]),
        (GOOD.replace("tenant =", "tennant ="), ["keys.0.tenant", "required"]),
        (GOOD + "limit = 5\n", ["keys.0.limit is an unknown field"]),
        (GOOD.replace('"acme"', '"acne"'), ["key 00112233aabb", "add [tenants.acne]"]),
        (GOOD.replace('"acme"', '"Acme Inc"'), ["keys.0.tenant", "pattern"]),
        (GOOD + GOOD.partition("\n")[2], ["key 00112233aabb is listed twice"]),
        (GOOD.replace("[tenants.acme]", "[tenants.acme]\nmax_sesions = 3"), ["tenants.acme.max_sesions"]),
        (GOOD.replace("[tenants.acme]", "[tenants.acme]\nrequests_per_s = 0"), ["requests_per_s must be above 0"]),
        (GOOD.replace("[tenants.acme]", "[tenants.acme]\nrequests_per_s = nan"), ["requests_per_s", "finite"]),
        (GOOD.replace("[tenants.acme]", "[tenants.acme]\nburst = 3"), ["tenants.acme: burst needs requests_per_s"]),
        (GOOD.replace("[tenants.acme]", "[tenants.acme]\nmax_concurrent = true"), ["max_concurrent", "integer"]),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_in_one_line(tmp_path: Path, text: str, words: list[str]) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        KeyFile(path)
    message = str(caught.value)
    assert "\n" not in message
    assert [word for word in [str(path), *words] if word not in message] == []


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        KeyFile(tmp_path / "keys.toml")


@pytest.mark.parametrize("where", ["as its hash", "unquoted"])
def test_a_key_that_stands_in_the_file_by_mistake_is_not_repeated(tmp_path: Path, where: str) -> None:
    key = make_key("acme")
    given = f'"{key.text}"' if where == "as its hash" else key.text
    path = tmp_path / "keys.toml"
    path.write_text(GOOD.replace(f'"{DIGEST}"', given))
    with pytest.raises(ConfigError) as caught:
        KeyFile(path)
    assert key.secret not in str(caught.value)
    assert caught.value.__cause__ is None or key.secret not in str(caught.value.__cause__)
