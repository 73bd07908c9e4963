from __future__ import annotations

import json

from tests.service.cli.conftest import Nsm, id_of


def test_states_as_a_table_and_as_json(nsm: Nsm) -> None:
    session_id = id_of(nsm("chat", "--max-tokens", 4, stdin="Hello").stderr)
    answer = json.loads(nsm("sessions", "states", session_id, "--json").stdout)
    lines = nsm("sessions", "states", session_id, "--detail", "head").stdout.splitlines()
    assert lines[0].startswith(f"position {answer['position']}, {answer['state_bytes']} bytes, dtype float32")
    assert lines[1].split()[:3] == ["where", "use", "untouched"]
    assert sum("head" in line for line in lines) == sum(2 for layer in answer["layers"] if layer["kind"] == "slots")


def test_slots_need_a_layer(nsm: Nsm) -> None:
    session_id = id_of(nsm("chat", "--max-tokens", 4, stdin="Hello").stderr)
    result = nsm("sessions", "states", session_id, "--detail", "slot")
    assert result.exit_code == 1
    assert "layer is required" in result.stderr
