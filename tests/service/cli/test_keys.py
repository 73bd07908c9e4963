from __future__ import annotations

import re
from pathlib import Path

import pytest

from service.api_keys import KeyFile
from tests.service.cli.conftest import Nsm, assert_one_line

SHOWN = re.compile(r"key for (\S+), shown this once: (nsm_\S+)\n")


def test_what_is_printed_goes_straight_into_the_file(nsm: Nsm, tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.write_text("[tenants.acme]\nmax_sessions = 5\n")
    keys = []
    for options in ((), ("--metrics",)):
        result = nsm("keys", "new", "--tenant", "acme", *options)
        found = SHOWN.fullmatch(result.stderr)
        assert found is not None, result.stderr
        assert (found[1], result.exit_code) == ("acme", 0)
        assert found[2].split("_", 2)[2] not in result.stdout
        path.write_text(path.read_text() + result.stdout)
        keys.append(found[2])
    entries = [KeyFile(path).find(key) for key in keys]
    assert [(entry.tenant, entry.metrics) for entry in entries if entry] == [("acme", False), ("acme", True)]


@pytest.mark.parametrize("tenant", ["", "Acme", "a b", "-x", "x" * 65, "a\n"])
def test_a_name_that_cannot_be_a_tenants_is_refused(nsm: Nsm, tenant: str) -> None:
    result = nsm("keys", "new", "--tenant", tenant)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert "must be 1 to 64 of a-z, 0-9, _ and -" in result.stderr


def test_a_misspelt_variable_is_refused(nsm: Nsm) -> None:
    result = nsm("keys", "new", "--tenant", "acme", NSM_API_KEY_FILE="x")
    assert_one_line(result, "unknown setting NSM_API_KEY_FILE; did you mean NSM_API_KEYS_FILE?")


def test_a_broken_file_of_keys_keeps_a_server_from_starting(
    nsm: Nsm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("service.server.configure_logging", lambda *wishes: None)  # this process's log is pytest's
    path = tmp_path / "keys.toml"
    path.write_text("[tenants.acme]\n")
    result = nsm("serve", "--port", 0, "--api-keys-file", path)
    assert_one_line(result, f"the API keys in {path} cannot be used: keys is required")
    result = nsm("serve", "--port", 0, "--host", "0.0.0.0")
    assert_one_line(
        result,
        "without API keys the server serves this machine only, not 0.0.0.0; name a file of keys with "
        "NSM_API_KEYS_FILE (docs/tenants.md), or let everybody in with NSM_ALLOW_ANONYMOUS=true",
    )
