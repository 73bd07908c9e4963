"""The same load over gRPC, straight to a Triton server: `python -m loadtests.triton --url 127.0.0.1:8001 --rates 1,2`.

Single completions and sessions whose states the worker keeps, in an open loop from a public trace. asyncio, because
Locust's gevent and gRPC's threads do not go together. Every request has a stream of its own on one channel.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import dataclasses
import itertools
import json
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import tritonclient.grpc.aio as triton_grpc
from tritonclient.utils import InferenceServerException

from loadtests.arrivals import TRACES, Arrival, plan_arrivals, read_trace
from loadtests.conclusion import SAMPLES, conclude, prepare_directory
from loadtests.errors import EXIT_NO_RESULT, RunError
from loadtests.interruption import Interrupted, interruptible
from loadtests.option_types import count, positive, share
from loadtests.run_end import RunEnd
from loadtests.samples import Sample
from loadtests.scripts import GREEDY, MAX_TRIES, MIN_MARGIN, Kind, Passages, Script, smallest_margin
from loadtests.slo import load_slo
from loadtests.steps import EXTRACTS

MODEL = "nsm"
LEAD_S = 0.2
DRAIN_S = 60.0
# gRPC takes http_proxy for loopback too; a load goes straight to its server
CHANNEL_OPTIONS = [
    ("grpc.enable_http_proxy", 0),
    ("grpc.max_send_message_length", triton_grpc.MAX_GRPC_MESSAGE_SIZE),
    ("grpc.max_receive_message_length", triton_grpc.MAX_GRPC_MESSAGE_SIZE),
]
UNIX_S = time.time() - time.monotonic()


@dataclasses.dataclass(slots=True)
class Answer:
    """What came on one stream. `at`: readings of `time.monotonic()` when pieces of text came."""

    text: str = ""
    at: list[float] = dataclasses.field(default_factory=list)
    num_tokens: int = 0
    details: dict[str, Any] = dataclasses.field(default_factory=dict)
    logprobs: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    is_final: bool = False

    def add(self, result: Any) -> None:
        at, response = time.monotonic(), result.get_response()
        tensors = {output.name: result.as_numpy(output.name) for output in response.outputs}
        if "text_output" in tensors and tensors["text_output"][0]:
            self.text += tensors["text_output"][0].decode()
            self.at.append(at)
        self.num_tokens += len(tensors.get("token_ids", ()))
        if "details" in tensors:
            self.details = json.loads(tensors["details"][0])
            self.logprobs += self.details.get("logprobs", [])
        self.is_final = response.parameters["triton_final_response"].bool_param


class TritonCaller:
    """`async with` it: one channel."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._client: Any = None

    async def __aenter__(self) -> TritonCaller:
        self._client = triton_grpc.InferenceServerClient(self._url, channel_args=CHANNEL_OPTIONS)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.close()

    async def generate(
        self, text: str, options: Mapping[str, Any], answer: Answer, *, leave_after: int | None = None
    ) -> None:
        """Fills `answer`; after `leave_after` pieces of text the stream is cancelled.

        Raises InferenceServerException for a refusal, grpc.RpcError for a server that is not there.
        """

        async def request() -> AsyncIterator[dict[str, Any]]:
            inputs = [_bytes("text_input", text), _bytes("options", json.dumps({**options, "stream": True}))]
            yield {"model_name": MODEL, "inputs": inputs, "enable_empty_final_response": True}

        stream = self._client.stream_infer(request())
        async for result, error in stream:
            if error is not None:
                raise error
            answer.add(result)
            if answer.is_final:
                return
            if leave_after is not None and len(answer.at) >= leave_after:
                stream.cancel()
                return

    async def ask(self, text: str, options: Mapping[str, Any]) -> Answer:
        answer = Answer()
        await self.generate(text, options, answer)
        return answer


def _bytes(name: str, text: str) -> Any:
    tensor = triton_grpc.InferInput(name, [1], "BYTES")
    tensor.set_data_from_numpy(np.array([text.encode()], dtype=np.object_))
    return tensor


async def write_scripts(caller: TritonCaller, args: argparse.Namespace) -> list[Script]:
    """Conversations and their answers while nobody else asks; see loadtests/scripts.py. The first turn of each is also
    what single completions ask for. Raises RunError when the server refuses or cannot be reached.
    """
    try:
        return await _ask_for_scripts(caller, args)
    except InferenceServerException as error:
        raise RunError(f"{args.url} refused: {error.message()}") from error
    except grpc.RpcError as error:
        raise RunError(f"{args.url} cannot be reached: {_details(error)}") from error
    except (KeyError, IndexError, TypeError) as error:
        raise RunError(f"{args.url} answered as another kind of model does: {error!r}") from error


def _details(error: grpc.RpcError) -> str:
    details = getattr(error, "details", None)
    return str(details()) if details is not None else repr(error)


async def _ask_for_scripts(caller: TritonCaller, args: argparse.Namespace) -> list[Script]:
    sample = Passages(1.0).take(2000)
    described = await caller.ask(sample, {"max_tokens": 1})
    passages = Passages(len(sample) / described.details["prompt_tokens"])
    return [await _write_script(caller, passages, args) for _ in range(args.scripts)]


async def _write_script(caller: TritonCaller, passages: Passages, args: argparse.Namespace) -> Script:
    inputs: list[str] = []
    answers: list[str] = []
    state: dict[str, Any] = {}
    for _ in range(args.turns):
        for _ in range(MAX_TRIES):
            text = passages.take(args.prompt_tokens)
            options = {**GREEDY, **state, "max_tokens": args.max_tokens, "logprobs": 2, "keep_state": True}
            answer = await caller.ask(text, options)
            margin = smallest_margin([logprob for _, logprob in token["top"]] for token in answer.logprobs)
            if margin >= MIN_MARGIN:
                break
        else:
            raise RunError(f"{MAX_TRIES} inputs, and none has a clear answer")
        state = {"resume": answer.details["resume"]}
        inputs.append(text)
        answers.append(answer.text)
    kind: Kind = "session"
    return Script(kind, args.max_tokens, tuple(inputs), tuple(answers), args.prompt_tokens)


class TritonLoad:
    """All arrivals; each is a task, started when the trace says so."""

    def __init__(self, caller: TritonCaller, scripts: Sequence[Script], args: argparse.Namespace) -> None:
        self._caller = caller
        self._scripts = scripts
        self._as_sessions = args.trace == "mooncake"
        self._cancel_every = round(1 / args.cancel_share) if args.cancel_share else 0
        self._newest: dict[int, asyncio.Task[None]] = {}
        self._states: dict[int, dict[str, Any]] = {}  # `resume` of each conversation
        self._done: dict[int, int] = {}  # turns of its script
        self.samples: list[Sample] = []

    async def run(self, arrivals: Sequence[Arrival]) -> None:
        start = time.monotonic() + LEAD_S
        tasks = []
        for arrival in arrivals:
            intended_at = start + arrival.at_s
            await asyncio.sleep(max(0.0, intended_at - time.monotonic()))
            before = self._newest.get(arrival.conversation) if self._as_sessions else None
            task = asyncio.create_task(self._serve(arrival, intended_at, before))
            self._newest[arrival.conversation] = task
            tasks.append(task)
        _, late = await asyncio.wait(tasks, timeout=DRAIN_S)
        for task in late:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _serve(self, arrival: Arrival, intended_at: float, before: asyncio.Task[None] | None) -> None:
        sample, answer = _begin(arrival, intended_at, "turn" if self._as_sessions else "arrival"), Answer()
        self.samples.append(sample)
        try:
            if before is not None:
                await asyncio.wait((before,))
                sample.lag_ms = _ms_since(intended_at)
            await self._ask(arrival, sample, answer)
        except InferenceServerException as error:
            _refused(sample, error.message())
        except grpc.RpcError as error:
            sample.outcome, sample.problem = "failed", f"no connection: {_details(error)}"
        finally:
            _time(sample, answer, intended_at)

    async def _ask(self, arrival: Arrival, sample: Sample, answer: Answer) -> None:
        script = self._scripts[arrival.conversation % len(self._scripts)]
        turn, state = self._next_turn(arrival, script)
        num_tokens = script.max_tokens if self._as_sessions else arrival.output_tokens
        is_cancelled = self._cancel_every > 0 and arrival.number % self._cancel_every == self._cancel_every - 1
        options = {**GREEDY, **state, "max_tokens": num_tokens, "keep_state": self._as_sessions}
        await self._caller.generate(script.inputs[turn], options, answer, leave_after=1 if is_cancelled else None)
        if not answer.is_final:
            sample.outcome = "cancelled"
            return
        sample.outcome = "ok"
        _check(sample, answer, script.answers[turn], num_tokens, state.get("resume", {}).get("position", 0))
        if self._as_sessions:
            self._states[arrival.conversation] = {"resume": answer.details["resume"]}
            self._done[arrival.conversation] = turn + 1

    def _next_turn(self, arrival: Arrival, script: Script) -> tuple[int, dict[str, Any]]:
        """The turn to take and the state it goes on from. A script that is played to its end begins anew."""
        turn = self._done.get(arrival.conversation, 0)
        if not self._as_sessions or turn >= len(script.inputs):
            return 0, {}
        return turn, self._states.get(arrival.conversation, {})


def _begin(arrival: Arrival, intended_at: float, scenario: str) -> Sample:
    step, intended_s, lag_ms = arrival.step, intended_at + UNIX_S, _ms_since(intended_at)
    return Sample(scenario=scenario, step=step, intended_s=intended_s, lag_ms=lag_ms, outcome="unfinished")


def _ms_since(at: float) -> float:
    return (time.monotonic() - at) * 1000


def _check(sample: Sample, answer: Answer, text: str, num_tokens: int, position: int) -> None:
    """A shorter answer is the beginning of a longer one; a character cut at its end is U+FFFD."""
    if not text.startswith(answer.text.rstrip("\ufffd")):
        sample.outcome, sample.problem = "wrong", f"expected {text!r}, got {answer.text!r}"
    elif answer.num_tokens != num_tokens:
        sample.outcome, sample.problem = "wrong", f"{answer.num_tokens} tokens, not {num_tokens}"
    elif answer.details["cached_tokens"] != position:
        sample.outcome, sample.problem = "wrong", f"{answer.details['cached_tokens']} tokens resumed, not {position}"


def _refused(sample: Sample, message: str) -> None:
    """The worker's errors read `code: message {details}`."""
    code = message.partition(":")[0]
    sample.outcome, sample.problem = ("rejected" if code == "overloaded" else "failed"), message[:200]
    if code == "overloaded":
        sample.retry_after_s = json.loads(message[message.rindex("{") :]).get("retry_after_s")


def _time(sample: Sample, answer: Answer, intended_at: float) -> None:
    sample.e2e_ms = _ms_since(intended_at)
    if answer.at:
        sample.ttft_ms = (answer.at[0] - intended_at) * 1000
        sample.itl_ms = [(after - before) * 1000 for before, after in itertools.pairwise(answer.at)]
    sample.tokens = answer.num_tokens
    sample.prompt_tokens = answer.details.get("prompt_tokens", 0)
    sample.resumed_tokens = answer.details.get("cached_tokens", 0)


def plan(args: argparse.Namespace) -> list[Arrival]:
    rows = read_trace(args.trace_file or TRACES / EXTRACTS[args.trace])
    steps = [(f"{index + 1}: {rate:g}/s", rate, args.step_s) for index, rate in enumerate(args.rates)]
    return plan_arrivals(rows, steps, length_scale=args.length_scale, max_output=args.max_tokens)


async def measure(args: argparse.Namespace, arrivals: Sequence[Arrival]) -> list[Sample]:
    """Raises RunError when the load cannot begin."""
    async with TritonCaller(args.url) as caller:
        load = TritonLoad(caller, await write_scripts(caller, args), args)
        await load.run(arrivals)
    return load.samples


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit codes as of `python -m loadtests`."""
    args = parse(arguments)
    try:
        with interruptible():
            return run(args)
    except (RunError, Interrupted) as error:
        sys.stderr.write(f"no result: {error}\n")
    return EXIT_NO_RESULT


def run(args: argparse.Namespace) -> int:
    slo, arrivals = load_slo(args.slo), plan(args)
    prepare_directory(args.out)
    started_at = time.monotonic()
    samples = asyncio.run(measure(args, arrivals))
    (args.out / SAMPLES).write_text("".join(f"{sample.to_json()}\n" for sample in samples), "utf-8")
    planned = dict(collections.Counter(arrival.step for arrival in arrivals))
    RunEnd(len(args.rates) * args.step_s, time.monotonic() - started_at, planned).write(args.out)
    return conclude(args.out, slo, facts={"server": args.url, "trace": args.trace, "requests": len(samples)})


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m loadtests.triton", description=__doc__)
    parser.add_argument("--url", default="127.0.0.1:8001", help="host:port of the server's gRPC")
    parser.add_argument("--slo", default="triton", help="a file, or a name in loadtests/objectives")
    parser.add_argument("--out", type=Path, default=Path("build/loadtest-triton"), help="directory of the report")
    parser.add_argument("--trace", choices=sorted(EXTRACTS), default="azure", help="mooncake: conversations")
    parser.add_argument(
        "--trace-file", type=Path, help="such a trace, instead of the extract that comes with the project"
    )
    parser.add_argument("--rates", type=_rates, default=(1.0, 2.0), help="requests a second of each step, with commas")
    parser.add_argument("--step-s", type=positive, default=10.0, help="seconds of a step")
    parser.add_argument("--length-scale", type=positive, default=0.05, help="factor on the trace's lengths")
    parser.add_argument("--scripts", type=count, default=3, help="different conversations")
    parser.add_argument("--turns", type=count, default=3, help="of each conversation")
    parser.add_argument("--prompt-tokens", type=count, default=32, help="of each turn")
    parser.add_argument("--max-tokens", type=count, default=16, help="of an answer")
    parser.add_argument(
        "--cancel-share", type=share, default=0.01, help="of the requests: left after their first token"
    )
    return parser.parse_args(arguments)


def _rates(text: str) -> tuple[float, ...]:
    return tuple(positive(rate) for rate in text.split(","))


if __name__ == "__main__":
    sys.exit(main())
