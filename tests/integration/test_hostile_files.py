"""X28: files of sessions and states that nobody exported: right checksums around values at every edge.

Each is refused as the client's fault, or used: no call that any of them reaches is a fault of the server.
"""

from __future__ import annotations

import base64
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from nsm_core.state.snapshot import SamplerState, Snapshot
from nsm_core.tokenizer import Tokenizer
from service.transfer.session_file import SessionFile, encode_file, read_file
from tests.support.gateway import FILE_HEADERS, Gateway, gateway
from tests.support.models import local_backend

LARGEST = 2**63 - 1
NO_TOKEN = 2**32 - 1
PENALTIES = {"presence_penalty": 1.0, "frequency_penalty": 1.0, "repetition_penalty": 1.2}
Change = Callable[[SessionFile], SessionFile]


def changed(**fields: Any) -> Change:
    """In the header of the file and that of its snapshot, wherever they have the fields."""

    def change(file: SessionFile) -> SessionFile:
        assert file.snapshot is not None
        header, inner = (
            dataclasses.replace(one, **{name: value for name, value in fields.items() if hasattr(one, name)})
            for one in (file.header, file.snapshot.header)
        )
        return dataclasses.replace(file, header=header, snapshot=Snapshot(inner, file.snapshot.state))

    return change


def with_state(byte: bytes) -> Change:
    def change(file: SessionFile) -> SessionFile:
        assert file.snapshot is not None
        state = (byte * len(file.snapshot.state))[: len(file.snapshot.state)]
        return dataclasses.replace(file, snapshot=Snapshot(file.snapshot.header, state))

    return change


def with_counts(counts: dict[int, int]) -> Change:
    return changed(sampler=SamplerState(seed=1, generated_counts=counts))


def at_version(version: int) -> Change:
    def change(file: SessionFile) -> SessionFile:
        marks = (*file.header.marks[:-1], dataclasses.replace(file.header.marks[-1], version=version))
        return changed(version=version, parent=version - 1, marks=marks)(file)

    return change


def with_last_mark(**fields: int) -> Change:
    def change(file: SessionFile) -> SessionFile:
        marks = (*file.header.marks[:-1], dataclasses.replace(file.header.marks[-1], **fields))
        return changed(marks=marks)(file)

    return change


def with_log(change: Callable[[tuple[int, ...]], tuple[int, ...]], **fields: Any) -> Change:
    return lambda file: changed(**fields)(dataclasses.replace(file, log_ids=change(file.log_ids)))


CHANGES: dict[str, Change] = {
    "the last version": at_version(LARGEST),
    "versions near the last": at_version(LARGEST - 2),
    "a version that JSON cannot tell from the next": at_version(2**53),
    "much energy": changed(energy_joules=1.7e308),
    "a far date": changed(created_at=1e308),
    "counts beyond every session": with_counts({5: LARGEST, 6: 1}),
    "counts at the engine's end": with_counts({5: 2**53}),
    "counts of no token": with_counts({NO_TOKEN: 1}),
    "counts of every token": with_counts(dict.fromkeys(range(300), 2**40)),
    "the largest seed": changed(sampler=SamplerState(seed=2**64 - 1, generated_counts={})),
    "a pending token that is none": with_log(lambda ids: (*ids[:-1], NO_TOKEN), pending_id=NO_TOKEN),
    "a token that is none": with_log(lambda ids: (NO_TOKEN, *ids[1:])),
    "such a token for another numerics class": with_log(lambda ids: (NO_TOKEN, *ids[1:]), numerics="other"),
    "an id of odd characters": changed(session_id="x\x00\ud800/../y"),
    "a long id": changed(session_id="x" * 1_000_000),
    "metadata of another kind": changed(metadata={"a": {"b": [1]}}),
    "a ttl without end": changed(ttl_s=1e308),
    "a ttl that is over": changed(ttl_s=-1.0),
    "a ttl that is a text": changed(ttl_s="x"),
    "a state of NaN": with_state(b"\xff"),
    "a state of zeros": with_state(b"\0"),
    "a state of the largest numbers": with_state(b"\xff\xff\x7f\x7f"),
    "no marks": changed(marks=()),
    "more sampled than there is": with_last_mark(num_sampled=LARGEST),
    "nothing sampled": with_last_mark(num_sampled=0),
    "another model": changed(model_fingerprint="other"),
    "another tokenizer": changed(model_fingerprint="other", tokenizer_fingerprint="other"),
    "another numerics class": changed(numerics="other"),
    "a far origin": changed(forked_from="x@9223372036854775807"),
    "no state": lambda file: dataclasses.replace(file, snapshot=None),
    "another tenant": changed(tenant="../x"),
}


@pytest.mark.parametrize("name", CHANGES)
async def test_X28_a_file_of_odd_values_is_refused_or_used(name: str, tiny_tokenizer: Tokenizer) -> None:
    async with gateway(local_backend(tiny_tokenizer)) as server:
        raw = encode_file(CHANGES[name](read_file(await exported(server))))
        for method, path, fields in calls_with(raw):
            answer = await server.client.request(method, path, **fields)
            assert answer.status_code < 500, (path, answer.text)
            assert b"internal_error" not in answer.content, path  # in a stream


async def exported(server: Gateway) -> bytes:
    """A session of two turns."""
    await server.client.post("/v1/sessions", json={"id": "s"})
    for text in ("one", "two"):
        body = {"input": text, "max_tokens": 3, "ignore_eos": True}
        assert (await server.client.post("/v1/sessions/s/generate", json=body)).status_code == 200
    return (await server.client.get("/v1/sessions/s/export")).content


def calls_with(raw: bytes) -> list[tuple[str, str, dict[str, Any]]]:
    """Everything that can be done with a file, as methods, paths and fields of a request."""
    turn = {"input": "x", "max_tokens": 2, **PENALTIES}
    done = [
        ("POST", "/v1/sessions/h/generate", turn),
        ("POST", "/v1/sessions/h/append", {"input": "x"}),
        ("POST", "/v1/sessions/h/fork", {"id": "f"}),
        ("POST", "/v1/sessions/f/generate", turn),
        ("POST", "/v1/sessions/h/rewind", {"to_position": 1}),
    ]
    for state in ("rules", base64.b64encode(raw).decode()):
        begun = {"max_tokens": 2, "state": state, **PENALTIES}
        chat = {"messages": [{"role": "user", "content": "x"}], "return_state": True, **begun}
        done += [
            ("POST", "/v1/completions", {"prompt": "x", "logprobs": 2, "echo": True, **begun}),
            ("POST", "/v1/chat/completions", chat),
            ("POST", "/v1/chat/completions", {**chat, "stream": True}),
            ("POST", "/v1/responses", {"input": "x", "max_output_tokens": 2, "state": state}),
            ("POST", "/v1/sessions", {"id": "t", "state": state}),
            ("POST", "/v1/sessions/t/generate", turn),
            ("POST", "/v1/sessions/t/clear", {"mark": 0}),
            ("DELETE", "/v1/sessions/t", None),
        ]
    imports = [("POST", path) for path in ("/v1/sessions/import?id=h", "/v1/states/import?name=rules")]
    reads = [
        ("GET", path)
        for path in ("/v1/sessions", "/v1/sessions/h/export", "/v1/sessions/h/states?recent=2", "/v1/states")
    ]
    return [
        *((*call, {"content": raw, "headers": FILE_HEADERS}) for call in imports),
        *((method, path, {"json": body}) for method, path, body in done),
        *((*call, {}) for call in reads),
    ]
