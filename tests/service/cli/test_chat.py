from __future__ import annotations

import asyncio
import json
import os
import pty
import re
import select
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nsm_core.chat_template import ChatMessage, get_template
from nsm_core.errors import TurnCancelled
from nsm_core.tokenizer import Tokenizer
from service.cli.conversation import Conversation, opened
from service.cli.options import make_sampling
from service.settings import load_settings
from tests.service.cli.conftest import NSM, Nsm, assert_one_line, id_of

MESSAGES = ("Who are you?", "Where do you live?", "Good night.")
SHORT = ("--max-tokens", 12)


def log_of(nsm: Nsm, session_id: str) -> dict[str, Any]:
    return dict(json.loads(nsm("sessions", "log", session_id, "--json").stdout))


def head_of(nsm: Nsm, session_id: str) -> dict[str, Any]:
    return dict(json.loads(nsm("sessions", "show", session_id, "--json").stdout))


def test_P4_resumed_chat_equals_an_unbroken_one(nsm: Nsm) -> None:
    unbroken = nsm("chat", "--seed", 5, *SHORT, stdin="\n".join(MESSAGES) + "\n")
    part = nsm("chat", "--seed", 5, *SHORT, stdin=MESSAGES[0])
    session_id, answers, positions = id_of(part.stderr), [part.stdout], [0]
    for message in MESSAGES[1:]:
        positions.append(head_of(nsm, session_id)["position"])
        part = nsm("chat", "--session", session_id, *SHORT, stdin=message)  # the seed is the session's
        answers.append(part.stdout)
    positions.append(head_of(nsm, session_id)["position"])
    assert "".join(answers) == unbroken.stdout
    assert positions == sorted(set(positions))
    assert head_of(nsm, session_id)["version"] == 3
    left, whole = log_of(nsm, session_id), log_of(nsm, id_of(unbroken.stderr))
    assert left["ids"] == whole["ids"]
    assert len(left["ids"]) - positions[-1] in (0, 1)  # all but the token sampled last was read


def test_P7_the_log_is_the_chat_in_the_models_template(nsm: Nsm, tiny_tokenizer: Tokenizer) -> None:
    result = nsm("chat", "--seed", 5, *SHORT, stdin="\n".join(MESSAGES))
    log = log_of(nsm, id_of(result.stderr))
    template = get_template("plain-v1")
    messages = [part for text in MESSAGES for part in (ChatMessage("user", text), ChatMessage("assistant", "\0"))]
    pieces = template.render(messages[:-1]).split("\0")
    pieces[1:] = [piece.removeprefix(template.answer_prefix) for piece in pieces[1:]]
    pattern = "(.*)".join(re.escape(piece.replace("Assistant: ", "Assistant:")) for piece in pieces) + "(.*)"
    found = re.fullmatch(pattern, log["text"], re.DOTALL)
    assert found is not None, log["text"]
    assert "".join(answer.removeprefix(" ") + "\n" for answer in found.groups()) == result.stdout
    assert log["ids"][0] == tiny_tokenizer.end_of_text_id
    assert log["ids"].count(tiny_tokenizer.end_of_text_id) == 1


def test_resumed_chat_shows_position_and_last_exchange(nsm: Nsm) -> None:
    first = nsm("chat", "--seed", 7, *SHORT, stdin="\n".join(MESSAGES[:2]))
    session_id = id_of(first.stderr)
    head, last_answer = head_of(nsm, session_id), nsm("chat", "--seed", 7, *SHORT, stdin=MESSAGES[0]).stdout
    back = nsm("chat", "--session", session_id, stdin="")
    greeting = f"session {session_id} at position {head['position']}, version 2"
    assert back.stderr.startswith(greeting)
    assert f"\nyou> {MESSAGES[1]}\n{first.stdout.removeprefix(last_answer)}" in back.stderr
    assert back.stdout == ""
    assert head_of(nsm, session_id) == head


def test_standard_output_holds_the_answers_alone(nsm: Nsm) -> None:
    quiet = nsm("chat", "--seed", 5, *SHORT, stdin=MESSAGES[0])
    result = nsm("chat", "--seed", 5, *SHORT, stdin=f"/help\n\n  \n{MESSAGES[0]}\n/info\n/what\n/exit\nnever said\n")
    assert result.stdout == quiet.stdout
    head = head_of(nsm, id_of(result.stderr))
    assert head["version"] == 1
    summary = f"version 1, position {head['position']}, {head['snapshot_bytes']} bytes"
    assert f"session {head['id']}: {summary}\n" in result.stderr
    assert "no such command: /what" in result.stderr


def test_resume_command_repeats_the_given_options(nsm: Nsm, model_dir: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "my sessions"
    result = nsm("chat", "--model", model_dir, "--data-dir", elsewhere, *SHORT, stdin="Hello")
    way_back = f"nsm chat --model {model_dir} --data-dir '{elsewhere}' --session {id_of(result.stderr)}"
    assert result.stderr.endswith(f"resume it with\n  {way_back}\n")
    assert (elsewhere / "sessions.db").exists()


def test_chat_without_a_turn_saves_no_session(nsm: Nsm) -> None:
    result = nsm("chat", stdin="/info\n")
    assert result.exit_code == 0
    assert result.stderr.endswith("no turns; no session was saved\n")
    assert json.loads(nsm("sessions", "list", "--json").stdout) == []


def test_P9_an_unknown_session_is_never_started_afresh(nsm: Nsm) -> None:
    session_id = id_of(nsm("chat", *SHORT, stdin="Hello").stderr)
    nsm("sessions", "delete", session_id)
    result = nsm("chat", "--session", session_id, stdin="Hello")
    assert_one_line(result, f"session '{session_id}' does not exist")
    assert json.loads(nsm("sessions", "list", "--json").stdout) == []


def test_a_name_of_ones_own_begins_a_session_and_finds_it_again(nsm: Nsm) -> None:
    first = nsm("chat", "--session", "mine", *SHORT, stdin="Hello")
    assert first.stderr.startswith("new session mine; ")
    assert first.stderr.endswith("resume it with\n  nsm chat --session mine\n")
    position = head_of(nsm, "mine")["position"]
    assert nsm("chat", "--session", "mine", stdin="").stderr.startswith(
        f"session mine at position {position}, version 1"
    )
    assert nsm("chat", "--session", "other", stdin="").stderr.endswith("no turns; no session was saved\n")
    assert [session["id"] for session in json.loads(nsm("sessions", "list", "--json").stdout)] == ["mine"]


@pytest.mark.parametrize("name", ["", "a b", "ä", "../x", "x" * 65])
def test_a_name_that_cannot_be_one_is_refused(nsm: Nsm, name: str) -> None:
    message = f"a session's id must be 1 to 64 characters of A-Z, a-z, 0-9, _ and -, got {name!r}"
    assert_one_line(nsm("chat", "--session", name, stdin="Hello"), message)


def test_a_session_of_another_model_is_refused(nsm: Nsm, other_model_dir: Path) -> None:
    session_id = id_of(nsm("chat", *SHORT, stdin="Hello").stderr)
    before = head_of(nsm, session_id)
    result = nsm("chat", "--session", session_id, "--model", other_model_dir, stdin="Hello")
    assert result.stderr.startswith(f"nsm: session '{session_id}' was made by model {before['model_fingerprint'][:12]}")
    assert result.stderr.count("\n") == 1
    assert result.exit_code == 1
    assert head_of(nsm, session_id) == before


def test_refused_message_ends_a_script_and_saves_nothing(nsm: Nsm) -> None:
    result = nsm("chat", *SHORT, stdin="much too long a message\nnever said\n", NSM_MAX_PROMPT_TOKENS="10")
    assert result.exit_code == 1
    assert result.stdout == ""
    assert re.search(r"\nnsm: the message must have at most 10 tokens, got \d+\n\Z", result.stderr)
    assert json.loads(nsm("sessions", "list", "--json").stdout) == []


def test_sessions_in_memory_end_with_the_process(nsm: Nsm, data_dir: Path) -> None:
    result = nsm("chat", "--store", "memory", *SHORT, stdin="Hello")
    assert result.stderr.endswith("the session was in this process's memory, and ends with it\n")
    assert not data_dir.exists()


def test_session_without_a_seed_draws_one_for_all_turns(nsm: Nsm) -> None:
    answers = [nsm("chat", "--max-tokens", 30, stdin=MESSAGES[0]).stdout for _ in range(2)]
    assert answers[0] != answers[1]


class Person:
    """Somebody at a terminal. Ctrl-C is a signal here: the test's terminal controls no process."""

    def __init__(self, *args: str) -> None:
        self._terminal, end = pty.openpty()
        self.process = subprocess.Popen([*NSM, "chat", *args], stdin=end, stdout=end, stderr=end)
        os.close(end)
        self._unread = ""

    def see(self, text: str) -> None:
        """Reads on until `text` has come."""
        while text not in self._unread:
            try:
                self._unread += os.read(self._terminal, 4096).decode()
            except OSError:  # the other end is closed
                raise AssertionError(f"{text!r} did not come, but {self._unread!r}") from None
        self._unread = self._unread.partition(text)[2]

    def type(self, text: str) -> None:
        os.write(self._terminal, text.encode())

    def press_ctrl_c(self) -> None:
        """Once more if nothing happens: a signal between showing a prompt and waiting at it is forgotten by Python."""
        self.process.send_signal(signal.SIGINT)
        while not select.select([self._terminal], [], [], 10.0)[0]:
            self.process.send_signal(signal.SIGINT)

    def leave(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._terminal)


@pytest.fixture
def person() -> Iterator[Person]:
    """Talks to a model that goes on and on."""
    person = Person("--temperature", "0", "--max-tokens", "100000")
    yield person
    person.leave()


def test_S8_ctrl_c_ends_an_answer_and_saves_nothing(nsm: Nsm, person: Person) -> None:
    beginning = nsm("chat", "--temperature", 0, "--max-tokens", 3, stdin="Hello").stdout.strip()
    person.see("you> ")
    person.type("Hello\n")
    person.see("Hello")  # the terminal's echo
    person.see(beginning)
    person.press_ctrl_c()
    person.see("stopped; this turn was not saved")
    person.see("you> ")
    person.type("/info\n")
    person.see("version 0, position 0")
    person.see("you> ")
    person.press_ctrl_c()  # at the prompt: leaves
    person.see("no turns; no session was saved")
    assert person.process.wait() == 0


def test_at_a_terminal_a_refused_message_does_not_end_the_chat(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NSM_MAX_PROMPT_TOKENS", "30")
    person = Person("--max-tokens", "4")
    try:
        person.see("you> ")
        person.type("a b c d e f g h i j k l m n o p q r s t u v w x y z\n")
        person.see("nsm: the message must have at most 30 tokens")
        person.see("you> ")
        person.type("Hi\n")
        person.see("you> ")
        person.type("\x04")  # Ctrl-D
        person.see("is at position")
        assert person.process.wait() == 0
    finally:
        person.leave()


async def test_S8_a_stopped_turn_leaves_the_session_at_its_last_commit() -> None:
    short, endless = (make_sampling(seed=5, max_tokens=count, temperature=0.0) for count in (4, 100_000))
    async with opened(load_settings(), session_id=None, sampling=short, has_own_seed=True) as conversation:
        await conversation.say("Hello", show=lambda text: None)
    committed, session_id = conversation.head, conversation.session_id
    async with opened(load_settings(), session_id=session_id, sampling=endless, has_own_seed=True) as conversation:
        await stop_in_mid_answer(conversation)
        assert conversation.head == committed
    async with opened(load_settings(), session_id=session_id, sampling=short, has_own_seed=True) as conversation:
        assert conversation.head == committed


async def stop_in_mid_answer(conversation: Conversation) -> None:
    is_answering = asyncio.Event()
    saying = asyncio.create_task(conversation.say("Hello", show=lambda text: is_answering.set()))
    await is_answering.wait()
    saying.cancel()
    with pytest.raises(TurnCancelled):
        await saying


def test_message_of_invalid_utf_8_is_reported(nsm: Nsm) -> None:
    result = nsm("chat", *SHORT, stdin=b"good \xff bad\n")
    assert result.exit_code == 1
    assert result.stderr.endswith("nsm: the input is not valid utf-8: invalid start byte at byte 5\n")
