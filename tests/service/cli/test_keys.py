from __future__ import annotations

import re
import stat
from pathlib import Path

import pytest
from typer.testing import Result

from service.cli.keys import is_begun
from service.tenants.api_keys import KeyFile
from tests.service.cli.conftest import Nsm, assert_one_line

SHOWN = re.compile(r"key for (\S+), shown this once: (nsm_\S+)\n")


def key_of(result: Result) -> str:
    found = SHOWN.search(result.stderr)
    assert found is not None, result.stderr
    assert result.exit_code == 0
    assert found[2].split("_", 2)[2] not in result.stdout
    return found[2]


def test_printed_entry_is_a_valid_key_file(nsm: Nsm, tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    result = nsm("keys", "new", "--tenant", "acme", "--metrics")
    path.write_text(result.stdout)
    entry = KeyFile(path).find(key_of(result))
    assert entry is not None
    assert (entry.tenant, entry.metrics) == ("acme", True)
    assert path.read_text().startswith("[tenants.acme]\n\n[[keys]]")


def test_added_key_declares_no_tenant_twice(nsm: Nsm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "keys.toml"
    path.write_text("[tenants.acme]\nmax_sessions = 5\n")
    with path.open("a") as file:
        assert is_begun(file)
    monkeypatch.setattr("service.cli.keys.is_begun", lambda output: True)
    result = nsm("keys", "new", "--tenant", "acme")
    assert "the file must have [tenants.acme] once; --file FILE sees to that" in result.stderr
    path.write_text(path.read_text() + result.stdout)
    assert KeyFile(path).find(key_of(result)) is not None
    with (tmp_path / "new.toml").open("a") as file:
        assert not is_begun(file)


def test_a_file_is_begun_and_added_to(nsm: Nsm, tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    names = ("acme", "acme", "ops")
    keys = [key_of(nsm("keys", "new", "--tenant", name, "--file", path)) for name in names]
    entries = [KeyFile(path).find(key) for key in keys]
    assert [entry.tenant for entry in entries if entry] == ["acme", "acme", "ops"]
    assert path.read_text().count("[tenants.acme]") == 1
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [file.name for file in tmp_path.iterdir() if "keys" in file.name] == ["keys.toml"]


def test_edited_file_keeps_comments_mode_and_link(nsm: Nsm, tmp_path: Path) -> None:
    path, link = tmp_path / "keys.toml", tmp_path / "link.toml"
    path.write_text("# ours\n[tenants.acme]  # no key yet\nmax_sessions = 5")
    path.chmod(0o640)
    link.symlink_to(path)
    key = key_of(nsm("keys", "new", "--tenant", "acme", "--file", link))
    limits = KeyFile(path).limits("acme")
    assert limits is not None
    assert limits.max_sessions == 5
    assert KeyFile(path).find(key) is not None
    assert path.read_text().startswith("# ours\n[tenants.acme]  # no key yet\n")
    assert (link.is_symlink(), stat.S_IMODE(path.stat().st_mode)) == (True, 0o640)


@pytest.mark.parametrize("text", ["[tenants.acme", "tenants = {ops = {}}\n", "[tenants.acme]\nmax_session = 5\n"])
def test_a_file_that_cannot_be_used_stays_as_it_is_and_no_key_is_shown(nsm: Nsm, tmp_path: Path, text: str) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(text)
    result = nsm("keys", "new", "--tenant", "acme", "--file", path)
    assert (result.exit_code, result.stdout, path.read_text()) == (1, "", text)
    assert "shown this once" not in result.stderr
    result = nsm("keys", "new", "--tenant", "acme", "--file", tmp_path / "nowhere" / "keys.toml")
    assert result.exit_code == 1
    assert "cannot write the API keys" in result.stderr


@pytest.mark.parametrize("tenant", ["", "Acme", "a b", "-x", "x" * 65, "a\n"])
def test_a_name_that_cannot_be_a_tenants_is_refused(nsm: Nsm, tenant: str) -> None:
    result = nsm("keys", "new", "--tenant", tenant)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert "must be 1 to 64 of a-z, 0-9, _ and -" in result.stderr


def test_a_misspelt_variable_is_refused(nsm: Nsm) -> None:
    result = nsm("keys", "new", "--tenant", "acme", NSM_API_KEY_FILE="x")
    assert_one_line(result, "unknown setting NSM_API_KEY_FILE; did you mean NSM_API_KEYS_FILE?")


def test_invalid_key_file_stops_the_start(nsm: Nsm, tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.write_text("[tenants.acme]\n")
    result = nsm("serve", "--port", 0, "--api-keys-file", path)
    note = "(set by NSM_API_KEYS_FILE or --api-keys-file)"
    assert_one_line(result, f"the API keys in {path} cannot be used: keys is required {note}")
    path.write_text(f'[[keys]]\nid = "{"0" * 12}"\ntenant = "acme"\nsha256 = "{"0" * 64}"\n')
    result = nsm("serve", "--port", 0, "--api-keys-file", path)
    reason = f"key {'0' * 12}: its tenant is not declared; add [tenants.acme]"
    assert_one_line(result, f"the API keys in {path} cannot be used: {reason} {note}")
    result = nsm("serve", "--port", 0, "--host", "0.0.0.0")
    assert_one_line(
        result,
        "without API keys the server serves this machine only, not 0.0.0.0; name a file of keys with "
        "NSM_API_KEYS_FILE (docs/tenants.md), or let everybody in with NSM_ALLOW_ANONYMOUS=true",
    )
