"""Two instances of a server, without Triton: calls that name one come to it by way of the other."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from nsm_core.errors import EngineDead, InvalidRequest
from nsm_core.sampling.params import SamplingParams
from nsm_core.tokenizer import Tokenizer
from nsm_core.triton.instances import Instances, directory_of
from nsm_core.triton.worker import Worker
from nsm_core.wire.call_tensors import encode_call
from nsm_core.wire.calls import Call, DescribeCall, GenerateCall, LinkCall, PostCall, ResumePoint, StatusCall
from nsm_core.wire.description import decode_description, decode_status
from nsm_core.wire.errors import StateMissing
from nsm_core.wire.link import Cancel, LinkStep, Start, decode_to_gateway, encode_to_worker
from tests.nsm_core.engine.harness import FINGERPRINT, small_model
from tests.nsm_core.triton.fake_triton import FakeResponder, worker_config
from tests.support.models import as_loaded
from tests.support.triton_servers import wait_until

CALL = GenerateCall(
    prompt_ids=(0, 5, 9), sampling=SamplingParams(max_tokens=6, ignore_eos=True, seed=3), stream=True, return_state=True
)
ENDLESS = dataclasses.replace(CALL, sampling=SamplingParams(max_tokens=100_000, ignore_eos=True, seed=3))


@dataclasses.dataclass
class Pair:
    """`ask`: by way of the first instance."""

    one: Worker
    two: Worker

    def ask(self, call: Call, instance: str | None) -> FakeResponder:
        responder = FakeResponder()
        self.one.accept(encode_call(call), {} if instance is None else {"instance": instance}, responder)
        return responder


@pytest.fixture
def pair(tiny_tokenizer: Tokenizer, tmp_path: Path) -> Iterator[Pair]:
    loaded = as_loaded(small_model(), tiny_tokenizer, fingerprint=FINGERPRINT)
    config = worker_config(max_slots=2, token_budget=32, queue_limit=3, kept_states_mb=1, drain_s=0.0)
    workers = [Worker(loaded, config, instance=(name, tmp_path / "sockets")) for name in ("one", "two")]
    for worker in workers:
        worker.start()
    yield Pair(*workers)
    for worker in workers:
        if worker.status().is_ready:
            worker.stop()
    assert_nothing_left(tmp_path)


def assert_nothing_left(tmp_path: Path) -> None:
    assert not (tmp_path / "sockets").exists()
    assert str(tmp_path) not in Path("/proc/net/unix").read_text()  # no connection was left open


def test_calls_come_to_an_instance_that_lets_its_requests_end(tiny_tokenizer: Tokenizer, tmp_path: Path) -> None:
    loaded = as_loaded(small_model(), tiny_tokenizer, fingerprint=FINGERPRINT)
    config = worker_config(max_slots=2, token_budget=32, queue_limit=3, kept_states_mb=1, drain_s=600.0)
    pair = Pair(*(Worker(loaded, config, instance=(name, tmp_path / "sockets")) for name in ("one", "two")))
    for worker in (pair.one, pair.two):
        worker.start()
    link = pair.ask(LinkCall("a"), "two")
    wait_until(lambda: len(link.answers) == 1, "the link")
    pair.ask(PostCall("a", 0, encode_to_worker([Start(0, ENDLESS)])), "two").wait()
    wait_until(lambda: len(link.answers) > 1, "the first step")
    stops = [worker.begin_stop() for worker in (pair.one, pair.two)]
    assert not decode_status(pair.ask(StatusCall(), "two").wait().answers[0]).is_ready
    pair.ask(PostCall("a", 1, encode_to_worker([Cancel(0)])), "two").wait()
    assert isinstance(error_of(link), EngineDead)
    for stop in stops:
        stop.result(60)
    assert isinstance(error_of(pair.ask(StatusCall(), "two")), EngineDead)
    for worker in (pair.one, pair.two):
        worker.stop()
    assert_nothing_left(tmp_path)


def error_of(responder: FakeResponder) -> Exception:
    failure = responder.wait().failure
    assert failure is not None
    assert responder.num_last == 1
    return failure.error


def test_a_call_goes_to_the_instance_that_it_names(pair: Pair) -> None:
    here, there = (pair.ask(CALL, name).wait() for name in ("one", "two"))
    assert here.ids == there.ids
    assert here.answers[-1]["state"].tobytes() == there.answers[-1]["state"].tobytes()
    assert [worker.status().engine.tokens_generated for worker in (pair.one, pair.two)] == [6, 6]
    described = decode_description(pair.ask(DescribeCall(), "two").wait().answers[0])
    assert described.instances == ("one", "two")


def test_what_the_other_refuses_comes_back_as_it_is(pair: Pair) -> None:
    point = ResumePoint(position=1, fingerprint=FINGERPRINT, generated_counts={}, state_id="no such state")
    assert isinstance(error_of(pair.ask(dataclasses.replace(CALL, resume=point), "two")), StateMissing)
    assert isinstance(error_of(pair.ask(dataclasses.replace(CALL, prompt_ids=(9_999,)), "two")), InvalidRequest)
    unknown = error_of(pair.ask(CALL, "three"))
    assert isinstance(unknown, InvalidRequest)
    assert str(unknown) == "instance must be one of one, two, got 'three'"


def test_a_link_by_way_of_another_instance_carries_its_requests(pair: Pair) -> None:
    link = pair.ask(LinkCall("a"), "two")
    wait_until(lambda: len(link.answers) == 1, "the link")
    for number in range(3):
        post = pair.ask(PostCall("a", number, encode_to_worker([Start(number, CALL)])), "two").wait()
        assert (post.failure, post.answers) == (None, [])

    def ends() -> list[int]:
        answers = [decode_to_gateway(tensors["messages"].tobytes()) for tensors in list(link.answers)]
        return sorted(number for step in answers if isinstance(step, LinkStep) for number, _ in step.step.ends)

    wait_until(lambda: ends() == [0, 1, 2], "the ends of the requests")
    assert pair.one.status().engine.tokens_generated == 0


def test_a_client_that_leaves_frees_the_other_instance(pair: Pair) -> None:
    responder = pair.ask(ENDLESS, "two")
    assert responder.has_answers.wait(60)
    responder.is_left = True
    pair.one.cancel_abandoned()

    def is_idle() -> bool:
        pair.two.cancel_abandoned()
        return pair.two.status().engine.num_running == 0

    wait_until(is_idle, "the end of the request")


def test_an_instance_that_is_gone_is_an_engine_that_is_dead(pair: Pair) -> None:
    responder = pair.ask(ENDLESS, "two")
    assert responder.has_answers.wait(60)
    pair.two.stop()
    responder.wait()
    if responder.failure is None:  # the worker's last word came through
        assert responder.answers[-1]["finish_reason"][0] == b"abort"
    gone = error_of(pair.ask(CALL, "two"))
    assert isinstance(gone, InvalidRequest | EngineDead)


def test_what_killed_servers_left_goes_with_the_next_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    own = directory_of(os.getpid())
    with subprocess.Popen(["sleep", "100"]) as other:
        running, killed = directory_of(other.pid), tmp_path / f"{own.name}0"  # the same process id, begun later
        shared = tmp_path / f"nsm-instances-{os.getuid()}-{2**30}-1"  # of a container with its own process ids
        foreign = tmp_path / "nsm-instances-other"
        for path in (running, killed, shared, foreign):
            path.mkdir()
        with socket.socket(socket.AF_UNIX) as gone, socket.socket(socket.AF_UNIX) as listening:
            gone.bind(str(killed / "one"))
            listening.bind(str(shared / "one"))
            listening.listen()
            gone.close()
            instances = Instances("one", own, lambda *call: None)

            async def start_and_stop() -> None:
                await instances.start()
                instances.stop_listening()

            asyncio.run(start_and_stop())
        other.kill()
    assert sorted(tmp_path.iterdir()) == sorted((running, shared, foreign))
