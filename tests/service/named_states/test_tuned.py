"""Tuned states as requests meet them, on an engine with a random model."""

from __future__ import annotations

import base64
import dataclasses
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest

from nsm_core.loaded_model import LoadedModel, SequenceModel
from nsm_core.state.quantize import StateFormat
from nsm_core.tokenizer import Tokenizer
from nsm_core.tuning.config import TuneConfig, split_examples
from nsm_core.tuning.run import TunedState, tune
from service.backends.local import LocalBackend
from service.named_states.tuned import SOURCE, tuned_file
from service.transfer.session_file import SessionFile, encode_file, read_file
from tests.support.gateway import Gateway, error_of, gateway
from tests.support.models import RandomModel, as_loaded, local_backend
from tests.support.rwkv7 import random_rwkv7, rwkv7_backend
from tests.support.tuning import examples_of, pairs

CONFIG = TuneConfig(num_epochs=2, batch_size=4, rate=0.1, eval_every=2)


@dataclasses.dataclass(frozen=True)
class Tuned:
    server: Gateway
    made: TunedState
    file: SessionFile
    held_out: tuple[int, ...]
    targets: tuple[int, ...]
    tolerance: float


# A model as it is trained, as it is served, and how far the losses may be apart: RWKV-7 is served in int8 here
Subject = tuple[Callable[[Tokenizer], LoadedModel[SequenceModel]], Callable[[Tokenizer], LocalBackend], float]
SUBJECTS: dict[str, Subject] = {
    "nsm": (lambda tokenizer: as_loaded(RandomModel(tokenizer.vocab_size), tokenizer), local_backend, 1e-4),
    "rwkv7": (random_rwkv7, rwkv7_backend, 0.05),
}


@pytest.fixture(params=SUBJECTS)
async def tuned(request: pytest.FixtureRequest, tiny_tokenizer: Tokenizer) -> AsyncIterator[Tuned]:
    """A server with the state `yes@1`."""
    load, make_backend, tolerance = SUBJECTS[request.param]
    loaded = load(tiny_tokenizer)
    train, held_out = split_examples(examples_of(pairs(10), tiny_tokenizer), seed=0)
    made = tune(loaded, CONFIG, train, held_out)
    async with gateway(make_backend(tiny_tokenizer)) as server:
        services = server.services
        file = tuned_file(
            made.state,
            model=loaded.info,
            tokenizer_fingerprint=tiny_tokenizer.fingerprint,
            tenant="default",
            name="yes",
            state_format=StateFormat.FP32,
        )
        await services.states.add("default", "yes", file, source=SOURCE, metadata={})
        yield Tuned(server, made, file, held_out[0].ids, held_out[0].targets, tolerance)


async def post(tuned: Tuned, path: str, **body: Any) -> httpx.Response:
    return await tuned.server.client.post(path, json=body)


async def complete(tuned: Tuned, **body: Any) -> dict[str, Any]:
    response = await post(tuned, "/v1/completions", **{"prompt": "Number 3:", "max_tokens": 5, "seed": 1, **body})
    assert response.status_code == 200, response.text
    return dict(response.json())


async def test_served_loss_is_the_one_of_training(tuned: Tuned) -> None:
    fields = {"prompt": list(tuned.held_out), "echo": True, "logprobs": 0, "max_tokens": 0}
    answer = await complete(tuned, **fields, state="yes@1")
    logprobs = answer["choices"][0]["logprobs"]["token_logprobs"]
    assert len(logprobs) == len(tuned.held_out)
    loss = -sum(logprobs[index] for index in tuned.targets) / len(tuned.targets)
    assert loss == pytest.approx(tuned.made.report.best_loss, rel=tuned.tolerance)
    plain = (await complete(tuned, **fields))["choices"][0]["logprobs"]["token_logprobs"]
    before = -sum(plain[index] for index in tuned.targets) / len(tuned.targets)
    assert loss < before


async def test_model_name_of_a_tuned_state_is_model_and_state(tuned: Tuned) -> None:
    named = await complete(tuned, state="yes@1")
    assert named["usage"]["prompt_tokens_details"]["cached_tokens"] == 1
    for name in ("ft:random:yes@1", "ft:random:yes"):
        name = name.replace("random", tuned.server.services.model_name)
        assert (await complete(tuned, model=name))["choices"] == named["choices"]
    assert named["choices"] != (await complete(tuned))["choices"]
    chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4, "seed": 1}
    chats = [
        (await post(tuned, "/v1/chat/completions", **chat, **fields)).json()["choices"]
        for fields in ({"state": "yes"}, {"model": f"ft:{tuned.server.services.model_name}:yes"})
    ]
    assert chats[0] == chats[1]


@pytest.mark.parametrize("model", ["ft:", "ft:random", "ft::yes", "ft:random:"])
async def test_model_name_without_its_parts_is_refused(tuned: Tuned, model: str) -> None:
    refused = await post(tuned, "/v1/completions", prompt="a", model=model)
    assert (refused.status_code, error_of(refused)["param"]) == (400, "model")


async def test_unknown_parts_of_a_model_name_are_named(tuned: Tuned) -> None:
    other = await post(tuned, "/v1/completions", prompt="a", model="ft:other:yes")
    assert (other.status_code, error_of(other)["code"]) == (404, "model_not_found")
    model = f"ft:{tuned.server.services.model_name}:no"
    missing = await post(tuned, "/v1/completions", prompt="a", model=model)
    assert (missing.status_code, error_of(missing)["code"]) == (404, "state_not_found")
    both = await post(tuned, "/v1/completions", prompt="a", model=f"{model}", state="yes")
    assert (both.status_code, error_of(both)["param"]) == (400, "state")


async def test_returned_state_goes_on_from_a_tuned_one(tuned: Tuned) -> None:
    whole = await complete(tuned, state="yes", temperature=0, max_tokens=8)
    first = await complete(tuned, state="yes", temperature=0, max_tokens=4, return_state=True)
    rest = await complete(tuned, prompt="", state=first["state"]["data"], temperature=0, max_tokens=4)
    assert first["choices"][0]["text"] + rest["choices"][0]["text"] == whole["choices"][0]["text"]
    file = read_file(base64.b64decode(first["state"]["data"]))
    assert file.is_tuned
    assert len(file.header.marks) == 2


@pytest.mark.parametrize(
    ("path", "fields"), [("/v1/sessions", {}), ("/v1/responses", {"input": "Hi"}), ("/v1/sessions/import", {})]
)
async def test_nothing_that_is_kept_with_its_log_starts_from_a_tuned_state(
    tuned: Tuned, path: str, fields: dict[str, Any]
) -> None:
    if path == "/v1/sessions/import":
        headers = {"content-type": "application/octet-stream"}
        response = await tuned.server.client.post(path, content=encode_file(tuned.file), headers=headers)
    else:
        response = await post(tuned, path, state="yes", **fields)
    assert response.status_code == 400
    assert error_of(response)["message"].startswith("a tuned state cannot become a session")
    unstored = await post(tuned, "/v1/responses", input="Hi", store=False, state="yes", max_output_tokens=3)
    assert unstored.status_code == 200


async def test_state_of_another_model_is_refused_and_not_made_again(tuned: Tuned) -> None:
    snapshot = tuned.file.snapshot
    assert snapshot is not None
    other = dataclasses.replace(
        tuned.file,
        header=dataclasses.replace(tuned.file.header, model_fingerprint="another"),
        snapshot=dataclasses.replace(
            snapshot, header=dataclasses.replace(snapshot.header, model_fingerprint="another")
        ),
    )
    data = base64.b64encode(encode_file(other)).decode()
    for path, fields in (
        ("/v1/completions", {"prompt": "a", "state": data}),
        ("/v1/states", {"name": "x", "file": data}),
    ):
        refused = await post(tuned, path, **fields)
        assert (refused.status_code, error_of(refused)["code"]) == (409, "state_mismatch")
        assert "tune it again for this one" in error_of(refused)["message"]


async def test_what_another_numerics_class_computed_from_it_is_refused(tuned: Tuned) -> None:
    first = await complete(tuned, state="yes", return_state=True)
    file = read_file(base64.b64decode(first["state"]["data"]))
    assert file.snapshot is not None
    header = dataclasses.replace(file.snapshot.header, numerics="cpu/other")
    other = dataclasses.replace(file, snapshot=dataclasses.replace(file.snapshot, header=header))
    refused = await post(tuned, "/v1/completions", prompt="", state=base64.b64encode(encode_file(other)).decode())
    assert (refused.status_code, error_of(refused)["code"]) == (409, "state_mismatch")
    assert "has no log to rebuild it from" in error_of(refused)["message"]


async def test_tuned_state_is_exported_imported_and_shown_as_one(tuned: Tuned) -> None:
    shown = (await tuned.server.client.get("/v1/states/yes@1")).json()
    assert (shown["source"], shown["position"], shown["num_tokens"]) == ("tuned", 1, 1)
    raw = (await tuned.server.client.get("/v1/states/yes@1/export")).content
    headers = {"content-type": "application/octet-stream"}
    copied = await tuned.server.client.post("/v1/states/import?name=copy", content=raw, headers=headers)
    assert copied.status_code == 200
    assert (await complete(tuned, state="copy"))["choices"] == (await complete(tuned, state="yes"))["choices"]
