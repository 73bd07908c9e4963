"""Load on an OpenAI-compatible server: streams, long prompts, continued conversations."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import random
import time
import uuid
from collections.abc import Callable
from typing import Any

from nsm_core.errors import NsmError
from nsm_lab.bench.http_client import Endpoint
from nsm_lab.bench.machine import ProcessUse
from nsm_lab.bench.times import RequestTimes, load_figures

# Common words, a token or two in every vocabulary: lengths in tokens are what the server's usage says.
WORDS = (
    "the",
    "of",
    "and",
    "to",
    "in",
    "is",
    "that",
    "for",
    "it",
    "as",
    "was",
    "with",
    "be",
    "by",
    "on",
    "not",
    "he",
    "his",
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HttpWork:
    """The work of each repeat.

    `concurrencies`: clients that stream together; `num_tokens`: that each asks for; `num_words`: of its prompt;
    `lengths`: words of prompts and conversations. `model`: None to leave the choice to the server.
    """

    concurrencies: tuple[int, ...]
    num_tokens: int
    lengths: tuple[int, ...]
    repeats: int
    model: str | None = None
    num_words: int = 16


class HttpLoad:
    """Sends requests to a server. `use`: of its process, if it runs on this machine."""

    def __init__(self, endpoint: Endpoint, work: HttpWork, use: ProcessUse | None = None) -> None:
        self._endpoint = endpoint
        self._work = work
        self._use = use
        self._random = random.Random(time.time_ns())  # no prompt of an earlier run is stored at the server
        self._has_sessions: bool | None = None

    async def run(self, *, on_progress: Callable[[int], None]) -> list[dict[str, float]]:
        """The figures of each repeat; a warm-up runs before. `on_progress` gets the number of repeats done."""
        await self.once()
        repeats = []
        for number in range(self._work.repeats):
            repeats.append(await self.once())
            on_progress(number + 1)
        return repeats

    async def once(self) -> dict[str, float]:
        """The figures of one repeat. Raises NsmError."""
        figures: dict[str, float] = {}
        for number in self._work.concurrencies:
            cpu_s = self._cpu_s()
            times = await asyncio.gather(*(self._complete(self._text(self._work.num_words)) for _ in range(number)))
            spent = None if cpu_s is None else (self._cpu_s() or 0.0) - cpu_s
            figures |= load_figures(f"stream.{number}", times, cpu_s=spent)
        for length in self._work.lengths:
            figures |= await self._prefill_and_conversation(length)
            figures |= await self._session(length)
        if self._use is not None:
            figures["memory.server.rss_mb"] = self._use.rss_mb()
        return figures

    async def _prefill_and_conversation(self, length: int) -> dict[str, float]:
        """Reads a new prompt, then the same prompt with more text at its end. The difference shows prefix caching."""
        text, cpu_s = self._text(length), self._cpu_s()
        read = await self._complete(text, num_tokens=1)
        figures = {
            f"prefill.{length}.tokens_per_s": read.prompt_tokens / read.ttft_s,
            f"conversation.{length}.reread_ms": read.ttft_s * 1e3,
        }
        spent = None if cpu_s is None else (self._cpu_s() or 0.0) - cpu_s
        if spent:
            figures[f"prefill.{length}.tokens_per_cpu_s"] = read.prompt_tokens / spent
        again = await self._complete(f"{text} {self._text(16)}", num_tokens=1)
        figures[f"conversation.{length}.continued_ms"] = again.ttft_s * 1e3
        figures[f"conversation.{length}.speedup"] = read.ttft_s / again.ttft_s
        return figures

    async def _session(self, length: int) -> dict[str, float]:
        """A stored session's next turn, where the server has sessions."""
        if self._has_sessions is False:
            return {}
        session_id = f"bench-{uuid.uuid4().hex}"
        try:
            await self._endpoint.json("POST", "/v1/sessions", {"id": session_id})
        except NsmError:
            if self._has_sessions:
                raise
            self._has_sessions = False
            return {}
        self._has_sessions = True
        try:
            path, body = f"/v1/sessions/{session_id}/generate", {"max_tokens": 1, "ignore_eos": True}
            read = await self._stream(path, {**body, "input": self._text(length)})
            resumed = await self._stream(path, {**body, "input": " " + self._text(16)})
        finally:
            with contextlib.suppress(NsmError):
                await self._endpoint.json("DELETE", f"/v1/sessions/{session_id}")
        return {
            f"session.{length}.reread_ms": read.ttft_s * 1e3,
            f"session.{length}.resumed_ms": resumed.ttft_s * 1e3,
            f"session.{length}.speedup": read.ttft_s / resumed.ttft_s,
        }

    async def _complete(self, prompt: str, *, num_tokens: int | None = None) -> RequestTimes:
        body = {"prompt": prompt, "max_tokens": num_tokens or self._work.num_tokens, "ignore_eos": True}
        return await self._stream("/v1/completions", body)

    async def _stream(self, path: str, body: dict[str, Any]) -> RequestTimes:
        fields = {**body, "stream": True, "stream_options": {"include_usage": True}, "temperature": 0}
        if self._work.model is not None:
            fields["model"] = self._work.model
        times = RequestTimes(started=time.perf_counter())
        async with contextlib.aclosing(self._endpoint.events(path, fields)) as events:
            async for event in events:
                now = time.perf_counter()
                if any(choice.get("text") for choice in event.get("choices", ())):
                    times.pieces.append(now)
                usage = event.get("usage")
                if usage:
                    details = usage.get("prompt_tokens_details") or {}
                    times.num_tokens, times.prompt_tokens = usage["completion_tokens"], usage["prompt_tokens"]
                    times.cached_tokens = details.get("cached_tokens") or 0
        times.ended = time.perf_counter()
        if not times.num_tokens:
            raise NsmError(f"{path}: the server's usage counts no tokens; it must know stream_options.include_usage")
        return times

    def _text(self, length: int) -> str:
        return " ".join(self._random.choices(WORDS, k=length))

    def _cpu_s(self) -> float | None:
        return None if self._use is None else self._use.cpu_s()
