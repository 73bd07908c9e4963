"""`nsm batches` on a store, beside a server that runs them or without one."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from service.stores.sessions.sqlite import SqliteSessionStore
from tests.service.cli.conftest import Nsm, assert_one_line
from tests.support.batches import input_of, lines_of
from tests.support.fakes import FakeBackend
from tests.support.gateway import gateway

BODY = {"prompt": "Hi", "max_tokens": 4}


def run_all(data_dir: Path, batch_id: str) -> dict[str, Any]:
    """A server on the store, until the batch has ended; the batch."""

    async def run() -> dict[str, Any]:
        async with gateway(FakeBackend(), is_live=True, store=SqliteSessionStore(data_dir / "sessions.db")) as server:
            while True:
                batch: dict[str, Any] = (await server.client.get(f"/v1/batches/{batch_id}")).json()
                if batch["status"] in ("completed", "failed", "cancelled"):
                    return batch
                await asyncio.sleep(0.02)

    return asyncio.run(run())


def made(nsm: Nsm, file: Path, *words: str) -> str:
    output = nsm("batches", "create", file, *words).stdout
    assert output.startswith("made batch_"), output
    return output.split()[1].rstrip(":")


def test_batch_is_made_run_shown_and_downloaded(nsm: Nsm, data_dir: Path, tmp_path: Path) -> None:
    assert nsm("batches", "list").stdout == "no batches\n"
    file, answers = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    file.write_bytes(input_of(BODY, {"prompt": 3, "max_tokens": 4}))
    batch_id = made(nsm, file)
    assert json.loads(nsm("batches", "show", batch_id, "--json").stdout)["status"] == "validating"
    early = nsm("batches", "download", batch_id, answers)
    assert_one_line(early, f"batch '{batch_id}' is validating: it has no output yet")
    assert run_all(data_dir, batch_id)["status"] == "completed"
    shown = dict(line.split(maxsplit=1) for line in nsm("batches", "show", batch_id).stdout.splitlines()[:4])
    assert shown == {
        "batch": batch_id,
        "status": "completed",
        "endpoint": "/v1/completions",
        "requests": "2, 1 answered, 1 failed",
    }
    assert nsm("batches", "list").stdout.splitlines()[1].split()[:4] == [batch_id, "completed", "2/2", "1"]
    assert nsm("batches", "download", batch_id, answers).stdout == f"wrote {answers}: 1 lines\n"
    assert lines_of(answers.read_bytes())["line-0"]["response"]["status_code"] == 200
    assert nsm("batches", "download", batch_id, answers, "--errors").stdout == f"wrote {answers}: 1 lines\n"
    assert lines_of(answers.read_bytes())["line-1"]["response"]["status_code"] == 400
    assert_one_line(nsm("batches", "cancel", batch_id), f"batch '{batch_id}' is completed: it cannot be cancelled")


def test_cancelled_batch_runs_nothing(nsm: Nsm, data_dir: Path, tmp_path: Path) -> None:
    file = tmp_path / "in.jsonl"
    file.write_bytes(input_of(BODY))
    batch_id = made(nsm, file, "--endpoint", "/v1/completions")
    assert nsm("batches", "cancel", batch_id).stdout == f"{batch_id} is cancelling\n"
    assert run_all(data_dir, batch_id)["status"] == "cancelled"
    assert nsm("batches", "download", batch_id, tmp_path / "out").stdout.endswith(": 0 lines\n")
    assert [one["id"] for one in json.loads(nsm("batches", "list", "--json").stdout)] == [batch_id]


def test_file_that_no_server_would_run_is_refused(nsm: Nsm, tmp_path: Path) -> None:
    file = tmp_path / "in.jsonl"
    for raw, words in (
        (b"", "the input file must have at least 1 request"),
        (b"[1]", "line 1: a line must be a JSON object"),
        (b"\n{", "line 2: "),
        (b'{"custom_id": "1"}', "line 1: endpoint must be one of"),
        (input_of(BODY, url="/v1/none"), "line 1: endpoint must be one of"),
        (input_of(BODY) + input_of(BODY), "line 2: custom_id must be given once in the file"),
    ):
        file.write_bytes(raw)
        result = nsm("batches", "create", file)
        assert result.exit_code == 1
        assert words in result.stderr
    file.write_bytes(input_of(BODY))
    other = nsm("batches", "create", file, "--endpoint", "/v1/embeddings")
    assert "line 1: url must be the batch's endpoint" in other.stderr
    assert nsm("batches", "list").stdout == "no batches\n"
    assert_one_line(nsm("batches", "show", "batch_none"), "batch 'batch_none' does not exist")


def test_answers_are_written_to_standard_output(nsm: Nsm, data_dir: Path, tmp_path: Path) -> None:
    file, copy = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    file.write_bytes(input_of(BODY, BODY))
    batch_id = made(nsm, file)
    run_all(data_dir, batch_id)
    nsm("batches", "download", batch_id, copy)
    written = nsm("batches", "download", batch_id, "-")
    assert written.stdout_bytes == copy.read_bytes()
    assert len(written.stdout.splitlines()) == 2
    assert not Path("-").exists()


@pytest.mark.parametrize("group", ["batches", "sessions", "states"])
def test_list_makes_no_store_where_there_is_none(nsm: Nsm, tmp_path: Path, group: str) -> None:
    mistyped = tmp_path / "dta"
    result = nsm(group, "list", "--data-dir", mistyped)
    assert_one_line(result, f"there is no session store {mistyped / 'sessions.db'}")
    assert not mistyped.exists()
