"""The API held against its own description at /openapi.json: requests out of it, right and wrong ones, and answers that
must be as it says. The engine is real and small, and the server is on a socket.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import inspect
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
import schemathesis
from fastapi import FastAPI
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis.checks import CHECKS
from schemathesis.generation import GenerationMode

from nsm_core.tokenizer import Tokenizer
from service.app import create_app
from service.schemas import answers
from service.schemas.answers import Answer
from service.settings import Settings
from service.stores.sessions.sqlite import SqliteSessionStore
from tests.support import call_generated_client
from tests.support.counts import scaled
from tests.support.gateway import FILE_HEADERS
from tests.support.live_server import serving
from tests.support.models import local_backend

# Not among them: whether all that the description allows is accepted. What a field may hold depends on the model and on
# other fields, and null stands for a field that is left out.
NAMES = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
)
EXPECTED = {200, 400, 404, 409, 413, 415, 422, 429}  # of docs/api.md: what one client alone can bring about
SESSION = "/v1/sessions/{session_id}"
STATE = "/v1/states/{state}"
RESPONSE = "/v1/responses/{response_id}"
CONVERSATION = "/v1/conversations/{conversation_id}"
ITEM = f"{CONVERSATION}/items/{{item_id}}"
UPLOAD = "/v1/files/{file_id}"
BATCH = "/v1/batches/{batch_id}"
JOBS = "/v1/fine_tuning/jobs"
JOB = f"{JOBS}/{{fine_tuning_job_id}}"
GENERATOR = Path(sys.prefix) / "client-generator" / "package"
MESSAGES = [{"role": "user", "content": "Hi"}]
DETAILS = {"include_energy": True, "include_routing": True, "max_tokens": 2}
# One request of each operation, or several, that must succeed: body, then query. FILE is an exported session.
FILE = "FILE"
FORM = {"file": b"{}", "purpose": "batch"}  # of a form
LONG_LINE = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "Hi", "max_tokens": 32}}
GOOD: dict[tuple[str, str], list[tuple[Any, dict[str, Any]]]] = {
    ("POST", "/v1/completions"): [
        ({"prompt": "Hi", "logprobs": 2, "echo": True, "n": 2, **DETAILS}, {}),
        ({"prompt": "Hi", "max_tokens": 2, "stream": True}, {}),
    ],
    ("POST", "/v1/chat/completions"): [
        ({"messages": MESSAGES, "logprobs": True, "top_logprobs": 1, **DETAILS}, {}),
        ({"messages": MESSAGES, "max_tokens": 2, "stream": True}, {}),
    ],
    ("POST", "/v1/responses"): [
        ({"input": "Hi", "max_output_tokens": 16, "include_energy": True, "instructions": "Be brief"}, {}),
        ({"input": MESSAGES, "max_output_tokens": 16, "stream": True}, {}),
    ],
    ("POST", "/v1/responses/input_tokens"): [({"input": "Hi"}, {})],
    ("GET", RESPONSE): [(None, {}), (None, {"stream": "true", "starting_after": "2"})],
    ("DELETE", RESPONSE): [(None, {})],
    ("POST", f"{RESPONSE}/cancel"): [(None, {})],
    ("GET", f"{RESPONSE}/input_items"): [(None, {"order": "asc"})],
    ("POST", "/v1/conversations"): [({"items": MESSAGES}, {}), (None, {})],
    ("GET", CONVERSATION): [(None, {})],
    ("POST", CONVERSATION): [({"metadata": {"a": "b"}}, {})],
    ("DELETE", CONVERSATION): [(None, {})],
    ("POST", f"{CONVERSATION}/items"): [({"items": MESSAGES}, {})],
    ("GET", f"{CONVERSATION}/items"): [(None, {})],
    ("GET", ITEM): [(None, {})],
    ("DELETE", ITEM): [(None, {})],
    ("POST", "/v1/sessions"): [(None, {}), ({"ttl_s": 60, "metadata": {"a": "b"}}, {})],
    ("GET", "/v1/sessions"): [(None, {"limit": "1"})],
    ("GET", SESSION): [(None, {})],
    ("PATCH", SESSION): [({"metadata": {"a": "b"}, "ttl_s": None}, {})],
    ("DELETE", SESSION): [(None, {})],
    ("POST", f"{SESSION}/generate"): [
        ({"input": "Hi", "logprobs": 1, **DETAILS}, {}),
        ({"input": "Hi", "max_tokens": 2, "stream": True}, {}),
    ],
    ("POST", f"{SESSION}/append"): [({"input": "Hi"}, {})],
    ("POST", f"{SESSION}/clear"): [({"mark": 1}, {})],
    ("POST", f"{SESSION}/cancel"): [(None, {})],
    ("POST", f"{SESSION}/fork"): [(None, {}), ({"metadata": {"a": "b"}}, {})],
    ("POST", f"{SESSION}/rewind"): [({"to_position": 1}, {})],
    ("GET", f"{SESSION}/export"): [(None, {})],
    ("POST", "/v1/sessions/import"): [(FILE, {"id": "imported"})],
    ("GET", f"{SESSION}/states"): [(None, {}), (None, {"detail": "slot", "layer": "0"}), (None, {"recent": "2"})],
    ("POST", "/v1/states"): [
        ({"name": "rules", "text": "Be brief.", "metadata": {"a": "b"}}, {}),
        ({"name": "rules", "messages": MESSAGES}, {}),
    ],
    ("GET", "/v1/states"): [(None, {})],
    ("GET", STATE): [(None, {})],
    ("DELETE", STATE): [(None, {})],
    ("GET", f"{STATE}/export"): [(None, {})],
    ("POST", "/v1/states/import"): [(FILE, {"name": "imported"})],
    ("GET", "/v1/streams/{stream_id}"): [(None, {"starting_after": "1"})],
    ("POST", "/v1/embeddings"): [({"input": ["Hi", "Ho"], "encoding_format": "base64", "dimensions": 8}, {})],
    ("POST", "/v1/files"): [(FORM, {})],
    ("GET", "/v1/files"): [(None, {"limit": "2", "purpose": "batch", "order": "asc"})],
    ("GET", UPLOAD): [(None, {})],
    ("DELETE", UPLOAD): [(None, {})],
    ("GET", f"{UPLOAD}/content"): [(None, {})],
    ("POST", "/v1/batches"): [
        ({"input_file_id": "", "endpoint": "/v1/completions", "completion_window": "24h", "metadata": {"a": "b"}}, {})
    ],
    ("GET", "/v1/batches"): [(None, {"limit": "2"})],
    ("GET", BATCH): [(None, {})],
    ("POST", f"{BATCH}/cancel"): [(None, {})],
    ("POST", JOBS): [({"model": "", "training_file": "", "seed": 1, "suffix": "a"}, {})],
    ("GET", JOBS): [(None, {"limit": "2"})],
    ("GET", JOB): [(None, {})],
    ("POST", f"{JOB}/cancel"): [(None, {})],
    ("POST", f"{JOB}/pause"): [(None, {})],
    ("POST", f"{JOB}/resume"): [(None, {})],
    ("GET", f"{JOB}/events"): [(None, {"limit": "2"})],
    ("GET", f"{JOB}/checkpoints"): [(None, {})],
    ("GET", "/v1/models"): [(None, {})],
    ("GET", "/v1/models/{model_id}"): [(None, {})],
    ("POST", "/tokenize"): [({"prompt": "Hi", "return_token_strs": True}, {}), ({"messages": MESSAGES}, {})],
    ("POST", "/detokenize"): [({"tokens": [1, 2]}, {})],
    ("GET", "/tokenizer_info"): [(None, {})],
    ("GET", "/health/live"): [(None, {})],
    ("GET", "/health/ready"): [(None, {})],
    ("GET", "/health"): [(None, {})],
    ("GET", "/metrics"): [(None, {})],
}


@contextlib.contextmanager
def in_a_thread(app: FastAPI) -> Iterator[str]:
    """The URL of `app`, served beside the test: what makes the requests is not asynchronous."""
    is_up, is_over, urls = threading.Event(), threading.Event(), []

    async def serve() -> None:
        async with serving(app) as url:
            urls.append(url)
            is_up.set()
            await asyncio.to_thread(is_over.wait)

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    try:
        assert is_up.wait(60)
        yield urls[0]
    finally:
        is_over.set()
        thread.join()


@dataclasses.dataclass(frozen=True)
class Api:
    """`schema`: the description, read as if answers had no fields but those in it."""

    schema: schemathesis.BaseSchema
    client: httpx.Client

    def operation(self, method: str, path: str) -> schemathesis.APIOperation:
        return self.schema[path][method]

    def made(self, path: str, **body: Any) -> dict[str, Any]:
        response = self.client.post(path, json=body)
        assert response.status_code == 200, response.text
        return dict(response.json())

    def ids(self, path: str) -> dict[str, str]:
        """Of things that are there, for the parameters in a path."""
        ids = {}
        if "session_id" in path or "stream_id" in path:
            ids["session_id"] = self.made("/v1/sessions")["id"]
            turn = self.made(f"/v1/sessions/{ids['session_id']}/generate", input="Hi there", max_tokens=2)
            ids["stream_id"] = turn["id"]
        if "response_id" in path:
            ids["response_id"] = self.made("/v1/responses", input="Hi", max_output_tokens=16)["id"]
        if "conversation_id" in path:
            ids["conversation_id"] = self.made("/v1/conversations", items=MESSAGES)["id"]
            items = self.client.get(f"/v1/conversations/{ids['conversation_id']}/items").json()
            ids["item_id"] = items["first_id"]
        if "{state}" in path:
            ids["state"] = self.made("/v1/states", name="rules", text="Be brief.")["id"]
        if "file_id" in path:
            ids["file_id"] = self.upload()
        if "batch_id" in path:
            ids["batch_id"] = self.made("/v1/batches", **self.batch(num_lines=100 if "cancel" in path else 1))["id"]
        if "fine_tuning_job_id" in path:
            ids["fine_tuning_job_id"] = self.made_job(path)
        if "model_id" in path:
            ids["model_id"] = self.client.get("/v1/models").json()["data"][0]["id"]
        return {name: value for name, value in ids.items() if f"{{{name}}}" in path}

    def upload(self, *, num_lines: int = 1, purpose: str = "batch") -> str:
        """The id of an input file."""
        lines = [json.dumps({**LONG_LINE, "custom_id": str(number)}) for number in range(num_lines)]
        form: dict[str, Any] = {"files": {"file": ("in", "\n".join(lines))}, "data": {"purpose": purpose}}
        return str(self.client.post("/v1/files", **form).json()["id"])

    def batch(self, *, num_lines: int = 1) -> dict[str, Any]:
        """A body that makes a batch."""
        body, _ = GOOD["POST", "/v1/batches"][0]
        return {**body, "input_file_id": self.upload(num_lines=num_lines)}

    def job(self) -> dict[str, Any]:
        """A body that makes a fine-tuning job. A tenant may have eight open ones: all but the last four are ended."""
        jobs = self.client.get(JOBS, params={"limit": 100}).json()["data"]
        for job in [job for job in jobs if job["finished_at"] is None][4:]:
            self.client.post(f"{JOBS}/{job['id']}/cancel")
        model = self.client.get("/v1/models").json()["data"][0]["id"]
        return {**GOOD["POST", JOBS][0][0], "model": model, "training_file": self.upload(purpose="fine-tune")}

    def made_job(self, path: str) -> str:
        """The id of a fine-tuning job in the condition that the operation on `path` is for."""
        job_id = str(self.made(JOBS, **self.job())["id"])
        last = path.rpartition("/")[2]
        if last == "resume":
            self.made(f"{JOBS}/{job_id}/pause")
        elif last not in ("cancel", "pause"):
            self.made(f"{JOBS}/{job_id}/cancel")
        return job_id

    def good(self, method: str, path: str) -> list[tuple[Any, dict[str, Any]]]:
        """GOOD, with the id of a file that is there."""
        makers = {"/v1/batches": self.batch, JOBS: self.job}
        if method == "POST" and path in makers:
            return [(makers[path](), query) for _, query in GOOD[method, path]]
        return GOOD[method, path]

    def send(self, case: schemathesis.Case) -> int:
        """The status of an answer that is as the description says."""
        response = case.call(base_url=str(self.client.base_url))
        case.validate_response(response, checks=[CHECKS.get_one(name) for name in NAMES])
        if response.status_code == 400:
            check_refusal(response.json()["error"])
        return response.status_code


def check_refusal(error: dict[str, Any]) -> None:
    """It says which field is wrong, unless it is the body as a whole."""
    is_whole = error["code"] in ("invalid_json", "invalid_session_file") or error["message"].startswith("the body ")
    assert error["param"] is not None or is_whole, error


def described(app: FastAPI) -> dict[str, Any]:
    document = dict(app.openapi())
    classes = {name: value for name, value in vars(answers).items() if inspect.isclass(value)}
    for name in (name for name, value in classes.items() if issubclass(value, Answer) and value is not Answer):
        document["components"]["schemas"][name]["additionalProperties"] = False
    return document


@pytest.fixture(scope="module")
def api(tiny_tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    wanted = Settings(
        data_dir=tmp_path_factory.mktemp("data"),
        fine_tuning_jobs=1,
        max_tokens_limit=32,
        max_prompt_tokens=512,
        max_body_bytes=100_000,
        retained_snapshots=2,
    )
    app = create_app(wanted, local_backend(tiny_tokenizer, queue_limit=512), SqliteSessionStore(None))
    schema = schemathesis.openapi.from_dict(described(app))
    with in_a_thread(app) as url, httpx.Client(base_url=url, timeout=60) as client:
        yield Api(schema, client)


@st.composite
def requests(draw: st.DrawFn, operation: schemathesis.APIOperation, ids: dict[str, str]) -> schemathesis.Case:
    """Right or wrong by the description, of things that are there or not. Some bodies keep few fields: what one
    with all of them says is almost never allowed as a whole.
    """
    mode = draw(st.sampled_from([GenerationMode.POSITIVE, GenerationMode.NEGATIVE]))
    case = draw(operation.as_strategy(generation_mode=mode))
    if ids and draw(st.integers(0, 3)):
        case.path_parameters = dict(ids)
    if isinstance(case.body, dict) and draw(st.booleans()):
        chosen = draw(st.sets(st.sampled_from(sorted(case.body)), max_size=3)) if case.body else set()
        case.body = {name: value for name, value in case.body.items() if name in chosen}
    return case


@pytest.mark.parametrize(("method", "path"), GOOD, ids=[" ".join(key) for key in GOOD])
def test_answers_are_as_the_description_says(api: Api, method: str, path: str) -> None:
    operation = api.operation(method, path)
    for body, query in api.good(method, path):
        fields: dict[str, Any] = {"path_parameters": api.ids(path), "query": query}
        if body == FILE:
            (session_id,) = api.ids(SESSION).values()
            fields["body"] = api.client.get(f"/v1/sessions/{session_id}/export").content
            fields["media_type"] = FILE_HEADERS["content-type"]
        elif body == FORM:
            fields |= {"body": body, "media_type": "multipart/form-data"}
        elif body is not None:
            fields |= {"body": body, "media_type": "application/json"}
        assert api.send(operation.Case(**fields)) == 200

    ids = api.ids(path)

    @settings(
        max_examples=scaled(4, 300),
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate],  # a failure is shown with its request: to make that smaller takes minutes
    )
    @given(case=requests(operation, ids))
    def whatever_is_sent(case: schemathesis.Case) -> None:
        assert api.send(case) in EXPECTED

    whatever_is_sent()


@pytest.mark.parametrize(("method", "path"), GOOD, ids=[" ".join(key) for key in GOOD])
def test_X8_a_client_that_reads_each_answer_as_the_first_listed_type_can(api: Api, method: str, path: str) -> None:
    """As generated clients do."""
    operation = api.operation(method, path)
    first_type, *_ = operation.definition.raw["responses"]["200"]["content"]
    body, query = api.good(method, path)[0]
    if body == FORM:
        answer = api.client.post(path, files={"file": b"{}"}, data={"purpose": "batch"})
    elif body == FILE:
        (session_id,) = api.ids(SESSION).values()
        file = api.client.get(f"/v1/sessions/{session_id}/export").content
        answer = api.client.request(
            method, path, params=dict.fromkeys(query, "read"), content=file, headers=FILE_HEADERS
        )  # fmt: skip
    else:
        url = path.format_map(api.ids(path))
        answer = api.client.request(method, url, params=query, **({} if body is None else {"json": body}))
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].partition(";")[0] == first_type
    if first_type == "application/json":
        assert isinstance(answer.json(), dict)


@pytest.mark.client_generator
def test_X8_a_generated_client_reads_an_answer_of_every_operation(api: Api, tmp_path: Path) -> None:
    """All but those whose answer, or body, is no JSON. A stock generator knows nothing of this server."""
    client = tmp_path / "client"
    generate_client(api, client)
    calls = []
    for method, path in GOOD:
        (body, query), *_ = api.good(method, path)
        definition = api.operation(method, path).definition.raw
        if body not in (FILE, FORM) and next(iter(definition["responses"]["200"]["content"])) == "application/json":
            body = {} if body is None and "requestBody" in definition else body  # the generator cannot leave it out
            fields = {**api.ids(path), **query, **({} if body is None else {"body": body})}
            calls.append({"operation": definition["operationId"], "fields": fields})
    assert len(calls) > 0.8 * len(GOOD)
    program = Path(call_generated_client.__file__)
    asked = json.dumps({"url": str(api.client.base_url), "calls": calls})
    answers = json.loads(run_beside(GENERATOR, [client], [str(program)], text=asked))
    for one, answer in zip(calls, answers, strict=True):
        assert answer["status"] == 200, (one, answer)
        assert answer["kind"] not in ("NoneType", "ErrorBody"), (one, answer)
        assert answer["value"] == answer["sent"], one


def generate_client(api: Api, directory: Path) -> None:
    description, options = directory.with_suffix(".json"), directory.with_suffix(".yml")
    description.write_text(api.client.get("/openapi.json").text)
    options.write_text("post_hooks: []\npackage_name_override: nsm_client\n")
    command = ["-m", "openapi_python_client", "generate", "--path", description, "--config", options]
    printed = run_beside(GENERATOR, [], [*command, "--output-path", directory])
    assert "WARNING" not in printed.upper(), printed  # it leaves out operations that it does not understand


def run_beside(packages: Path, others: Sequence[Path], command: Sequence[object], *, text: str = "") -> str:
    """The output of Python with `packages` and `others` before its own."""
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (*others, packages)))}
    ran = subprocess.run(
        [sys.executable, *map(str, command)], input=text, capture_output=True, text=True, check=False, env=environ
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


def test_every_operation_is_tried(api: Api) -> None:
    operations = [result.ok() for result in api.schema.get_all_operations()]
    assert {(operation.method.upper(), operation.path) for operation in operations} == set(GOOD)
