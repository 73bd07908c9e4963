"""The conversations that users have, and what each answer must be: asked for one at a time before any load.

An answer is greedy, so it depends on the text alone. That holds to the last bit for one request at a time; in a batch
sums are made in another order, and where two tokens are as good as equal the other one may win. So a script is made
of inputs whose answers are nowhere that close (`MIN_MARGIN`): then any other text under load is a fault.
"""

from __future__ import annotations

import dataclasses
import io
import itertools
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import zstandard

from loadtests.errors import RunError
from loadtests.plain_http import call
from loadtests.run_profile import Profile

BOOKS = Path(__file__).resolve().parent.parent / "data" / "books-sample"
MIN_MARGIN = 0.01  # nats between the likeliest token and the next, at every token of an answer
MAX_TRIES = 30  # inputs for one answer
GREEDY: Mapping[str, Any] = {"temperature": 0, "seed": 0, "ignore_eos": True}
Parsed = TypeVar("Parsed")
Kind = Literal["completion", "slow", "chat", "session", "long"]


@dataclasses.dataclass(frozen=True, slots=True)
class Script:
    """`answers[n]` is what must follow `inputs[n]` after all that came before it."""

    kind: Kind
    max_tokens: int
    inputs: tuple[str, ...]
    answers: tuple[str, ...]
    prompt_tokens: int = 0  # of the first input, about


@dataclasses.dataclass(frozen=True, slots=True)
class Scripts:
    """All that a run needs."""

    scripts: tuple[Script, ...]

    def of(self, kind: Kind) -> list[Script]:
        return [script for script in self.scripts if script.kind == kind]

    def nearest(self, prompt_tokens: int) -> list[Script]:
        """Completions whose prompt has about that length."""
        completions = self.of("completion")
        length = min((script.prompt_tokens for script in completions), key=lambda has: abs(has - prompt_tokens))
        return [script for script in completions if script.prompt_tokens == length]

    def write(self, path: Path) -> None:
        path.write_text(json.dumps([dataclasses.asdict(script) for script in self.scripts]), "utf-8")


def read_scripts(path: Path) -> Scripts:
    """Raises RunError for a file that is not there, or holds something else."""
    try:
        items = json.loads(path.read_text("utf-8"))
        return Scripts(tuple(_script(item) for item in items))
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise RunError(f"{path} cannot be read as scripts, which --only-scripts writes: {error}") from error


def _script(item: Mapping[str, Any]) -> Script:
    return Script(**{**item, "inputs": tuple(item["inputs"]), "answers": tuple(item["answers"])})


class Passages:
    """Consecutive pieces of the bundled excerpts of books, for ever."""

    def __init__(self, chars_per_token: float) -> None:
        self._chars_per_token = chars_per_token
        self._text = "\n\n".join(read_books())
        self._at = 0

    def take(self, num_tokens: int) -> str:
        """About so many tokens, from the start of a word to the end of one."""
        end = self._at + max(8, round(num_tokens * self._chars_per_token))
        if end >= len(self._text) - 64:
            self._at, end = 0, end - self._at
        end = self._text.index(" ", end)
        piece = self._text[self._at : end].strip()
        self._at = end
        return piece


def read_books() -> Iterator[str]:
    for path in sorted(BOOKS.glob("*.jsonl.zst")):
        raw = zstandard.ZstdDecompressor().stream_reader(io.BytesIO(path.read_bytes())).read()
        for line in raw.decode().split("\n"):
            if line:
                yield json.loads(line)["text"]


class Author:
    """Writes the scripts of a profile, with the answers of the service at `url` when nobody else asks it."""

    def __init__(self, url: str, profile: Profile, *, needs: Sequence[Kind]) -> None:
        self._url = url
        self._profile = profile
        self._needs = needs
        self._ids = itertools.count()
        self._run = f"{time.time_ns():x}"
        self._passages = Passages(self._measure_chars_per_token())

    def write(self) -> Scripts:
        """Raises RunError when the service refuses or cannot be reached, or too few answers are clear."""
        texts = self._profile.texts
        scripts: list[Script] = []
        for _ in range(texts.scripts):
            if "completion" in self._needs:
                scripts += [self._completion("completion", n, texts.max_tokens) for n in texts.prompt_tokens]
            if "slow" in self._needs:
                scripts.append(self._completion("slow", texts.prompt_tokens[0], texts.slow_tokens))
            if "chat" in self._needs:
                scripts.append(self._chat())
            if "session" in self._needs:
                scripts.append(self._session("session", [texts.prompt_tokens[0]] * texts.turns))
        if "long" in self._needs:
            behaviour = self._profile.behaviour
            num_chunks = math.ceil(behaviour.long_context_tokens / behaviour.long_chunk_tokens)
            scripts.append(self._session("long", [behaviour.long_chunk_tokens] * num_chunks))
        return Scripts(tuple(scripts))

    def _completion(self, kind: Kind, prompt_tokens: int, max_tokens: int) -> Script:
        for _ in range(MAX_TRIES):
            prompt = self._passages.take(prompt_tokens)
            body = {**GREEDY, "prompt": prompt, "max_tokens": max_tokens, "logprobs": 2, "cache_prompt": False}
            answer, margin = self._read("/v1/completions", body, completion_answer)
            if margin >= MIN_MARGIN:
                return Script(kind, max_tokens, (prompt,), (answer,), prompt_tokens)
        raise RunError(f"{MAX_TRIES} prompts, and none has a clear answer")

    def _chat(self) -> Script:
        texts = self._profile.texts
        messages: list[dict[str, str]] = []
        for _ in range(texts.turns):
            for _ in range(MAX_TRIES):
                asked = [*messages, {"role": "user", "content": self._passages.take(texts.prompt_tokens[0])}]
                options = {"max_completion_tokens": texts.max_tokens, "logprobs": True, "top_logprobs": 2}
                body = {**GREEDY, **options, "messages": asked}
                answer, margin = self._read("/v1/chat/completions", body, chat_answer)
                if margin >= MIN_MARGIN:
                    break
            else:
                raise RunError(f"{MAX_TRIES} messages, and none has a clear answer")
            messages = [*asked, {"role": "assistant", "content": answer}]
        contents = [message["content"] for message in messages]
        return Script("chat", texts.max_tokens, tuple(contents[::2]), tuple(contents[1::2]))

    def _session(self, kind: Kind, lengths: Sequence[int]) -> Script:
        """Every turn is tried on a fork, so that an unclear answer costs its own turn and nothing else."""
        max_tokens = self._profile.texts.max_tokens
        head = self._new_id()
        self._post("/v1/sessions", {"id": head})
        inputs, answers = [], []
        for length in lengths:
            for _ in range(MAX_TRIES):
                fork, text = self._new_id(), self._passages.take(length)
                self._post(f"/v1/sessions/{head}/fork", {"id": fork})
                body = {**GREEDY, "input": text, "max_tokens": max_tokens, "logprobs": 2}
                answer, margin = self._read(f"/v1/sessions/{fork}/generate", body, completion_answer)
                if margin >= MIN_MARGIN:
                    break
                self._delete(fork)
            else:
                raise RunError(f"{MAX_TRIES} inputs, and none has a clear answer")
            self._delete(head)
            head = fork
            inputs.append(text)
            answers.append(answer)
        self._delete(head)
        return Script(kind, max_tokens, tuple(inputs), tuple(answers), lengths[0])

    def _new_id(self) -> str:
        return f"script-{self._run}-{next(self._ids)}"

    def _measure_chars_per_token(self) -> float:
        sample = next(read_books())[:4000]
        return len(sample) / self._read("/tokenize", {"prompt": sample}, lambda answer: int(answer["count"]))

    def _post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        return call(self._url, "POST", path, body)

    def _read(self, path: str, body: Mapping[str, Any], parse: Callable[[dict[str, Any]], Parsed]) -> Parsed:
        """Raises RunError for an answer of another kind of service."""
        answer = self._post(path, body)
        try:
            return parse(answer)
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise RunError(f"{self._url} answered {path} as another kind of service does: {error!r}") from error

    def _delete(self, session_id: str) -> None:
        call(self._url, "DELETE", f"/v1/sessions/{session_id}")


def completion_answer(body: Mapping[str, Any]) -> tuple[str, float]:
    """Text and the smallest margin of an answer in the shape of /v1/completions with log-probabilities."""
    choice = body["choices"][0]
    return choice["text"], smallest_margin(list(top.values()) for top in choice["logprobs"]["top_logprobs"])


def chat_answer(body: Mapping[str, Any]) -> tuple[str, float]:
    """The same of /v1/chat/completions."""
    choice = body["choices"][0]
    tops = ([top["logprob"] for top in token["top_logprobs"]] for token in choice["logprobs"]["content"])
    return choice["message"]["content"], smallest_margin(tops)


def smallest_margin(alternatives: Any) -> float:
    """`alternatives`: log-probabilities of the likeliest tokens, for each token of an answer."""
    margin = math.inf
    for logprobs in alternatives:
        first, second = (*sorted(logprobs, reverse=True), -math.inf, -math.inf)[:2]
        margin = min(margin, first - second)
    return margin
