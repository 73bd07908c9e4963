from __future__ import annotations

import json
import re
from pathlib import Path

from tests.service.cli.conftest import Nsm, assert_one_line, id_of


def test_states_are_made_listed_shown_moved_and_deleted(nsm: Nsm, tmp_path: Path) -> None:
    assert nsm("states", "list").stdout == "no states\n"
    made = nsm("states", "create", "rules", "--text", "Answer briefly.").stdout
    assert made.startswith("made rules@1: ")
    session_id = id_of(nsm("chat", "--max-tokens", 4, stdin="Hello").stderr)
    assert nsm("states", "create", "rules", "--session", session_id).stdout.startswith("made rules@2: ")
    early = nsm("states", "create", "early", "--session", session_id, "--position", 3, "--published").stdout
    assert early == "made early@1: 3 tokens\n"
    listed = json.loads(nsm("states", "list", "--json").stdout)
    assert [(state["id"], state["published"]) for state in listed] == [
        ("rules@2", False),
        ("rules@1", False),
        ("early@1", True),
    ]
    assert nsm("states", "list").stdout.splitlines()[1].split()[0] == "rules@2"
    shown = json.loads(nsm("states", "show", "rules@1", "--json").stdout)
    assert (shown["id"], shown["source"]) == ("rules@1", "text")
    file = tmp_path / "rules.nsm-state"
    assert nsm("states", "export", "rules@1", file).stdout.startswith(f"wrote {file}: ")
    assert nsm("states", "import", "copy", file).stdout == f"made copy@1: {shown['num_tokens']} tokens\n"
    assert nsm("states", "delete", "rules").stdout == "deleted rules (2 versions)\n"
    assert nsm("states", "delete", "early", "--published").stdout == "deleted early\n"
    assert [state["id"] for state in json.loads(nsm("states", "list", "--json").stdout)] == ["copy@1"]


def test_what_cannot_be_is_one_line(nsm: Nsm) -> None:
    nsm("states", "create", "x", "--text", "Once")
    assert_one_line(nsm("states", "show", "none"), "state 'none' does not exist")
    assert_one_line(nsm("states", "delete", "x@2"), "state 'x@2' does not exist")
    usage = "Invalid value: give exactly one of --text, --file and --session"
    assert_one_line(nsm("states", "create", "x"), usage, status=2)
    late = nsm("states", "create", "x", "--text", "a", "--position", 4)
    assert_one_line(late, "Invalid value: --position is for --session", status=2)
    assert_one_line(
        nsm("states", "create", "x", "--text", ""),
        "Invalid value: a state must read at least 1 character, the text is empty",
        status=2,
    )


def test_published_name_is_refused_to_a_tenant(nsm: Nsm, tmp_path: Path) -> None:
    nsm("states", "create", "rules", "--text", "Once", "--published")
    words = "the operator has published a state 'rules': choose another name"
    assert_one_line(nsm("states", "create", "rules", "--text", "Twice"), words)
    file = tmp_path / "rules.nsm-state"
    nsm("states", "export", "rules", file)
    assert_one_line(nsm("states", "import", "rules", file), words)
    assert nsm("states", "import", "rules", file, "--published").stdout.startswith("made rules@2: ")


def test_shown_state_has_dates_and_words(nsm: Nsm) -> None:
    nsm("states", "create", "x", "--text", "Once", "--published")
    nsm("states", "create", "y", "--text", "Once")
    shown = dict(line.split(maxsplit=1) for line in nsm("states", "show", "x").stdout.splitlines())
    assert (shown["state"], shown["published"]) == ("x@1", "yes")
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", shown["created"])
    assert re.search(r"^published +no$", nsm("states", "show", "y").stdout, re.MULTILINE)
