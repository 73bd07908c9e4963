"""POST /v1/completions as a use case: prompts and choices -> engine requests -> completion objects."""

from __future__ import annotations

import contextlib
import math
from collections.abc import AsyncGenerator, Sequence
from functools import partial
from typing import Any

from nsm_core.engine.request import TokenLogprob
from nsm_core.tokenizer import Tokenizer
from service.deps import Arrival, Services
from service.generate.choices import RequestGroup, ends_of, submit_group
from service.generate.deltas import Delta, ScoredToken
from service.generate.group_answer import GroupAnswer
from service.generate.openai_format import Envelope, LegacyLogprobs, finish_reason, routing_of
from service.generate.starting import ReturnedState, find_state, read_after, returned_state, start_after
from service.generate.structured import with_grammar
from service.prompts import Prompt
from service.schemas.common import RequestSpec
from service.schemas.completions import CompletionBody
from service.stores.prefixes.resume import Start
from service.web.sse import TextFrame, frame

KIND = "text_completion"


class Completion(GroupAnswer):
    def __init__(
        self,
        group: RequestGroup,
        body: CompletionBody,
        choices: Sequence[ChoiceText],
        envelope: Envelope,
        returned: ReturnedState | None = None,
    ) -> None:
        super().__init__(group, body, envelope, returned, choices_per_prompt=body.num_candidates, chunk_kind=KIND)
        self._body = body
        self._choices = choices

    async def frames(self) -> AsyncGenerator[bytes, None]:
        """For each choice its pieces and one empty piece with the reason; then usage, if asked for."""
        texts = [TextFrame(partial(self._text_frame, index)) for index in range(len(self._choices))]
        has_running_usage = self._body.has_running_usage
        if self._choices[0].is_plain(Delta()) and not has_running_usage:
            self._show_directly(texts[0])
        for index, choice in enumerate(self._choices):
            if choice.echo_text:
                yield self._frame(index, choice.take_echo())
        async with contextlib.aclosing(self.group.batches()) as batches:
            async for batch in batches:
                frames = []
                for index, delta in batch:
                    choice = self._choices[index]
                    if choice.is_plain(delta) and not has_running_usage:
                        frames.append(texts[index](delta.text))
                    else:
                        frames += [self._frame(index, piece) for piece in choice.pieces(delta)]
                yield b"".join(frames)
        async with contextlib.aclosing(self._frames_without_choices()) as last:
            async for data in last:
                yield data
                data = b""  # as in `until_done`

    async def collect(self) -> dict[str, Any]:
        """The whole answer as one object."""
        parts: list[list[dict[str, Any]]] = [
            [choice.take_echo()] if choice.echo_text else [] for choice in self._choices
        ]
        async with contextlib.aclosing(self.group.batches()) as batches:
            async for batch in batches:
                for index, delta in batch:
                    parts[index].extend(self._choices[index].pieces(delta))
        joined = [choice.join(pieces) for choice, pieces in zip(self._choices, parts, strict=True)]
        choices = [{"index": index, **joined[number]} for index, number in enumerate(self._best())]
        ends = ends_of(self.group)
        return self._envelope.wrap(KIND, choices, usage=self._usage(ends), **await self._state_field())

    def _best(self) -> list[int]:
        """The numbers of the choices to answer with: for each prompt the n most likely, of the best first."""
        body, numbers = self._body, list(range(len(self._choices)))
        num_candidates = body.num_candidates
        if num_candidates == body.n:
            return numbers
        groups = [numbers[start : start + num_candidates] for start in range(0, len(numbers), num_candidates)]
        return [
            number
            for group in groups
            for number in sorted(group, key=lambda number: -self._choices[number].mean_logprob)[: body.n]
        ]

    def _frame(self, index: int, piece: dict[str, Any]) -> bytes:
        return frame(self._envelope.wrap(KIND, [{"index": index, **piece}], **self._chunk_usage()))

    def _text_frame(self, index: int, text: str) -> bytes:
        return self._frame(index, text_piece(text))


class ChoiceText:
    """One choice as the client sees it: the echoed prompt, if asked for, then the generated text.

    `echo_text`: sent at once; empty with logprobs, because the echo waits for those of the prompt.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        has_logprobs: bool,
        has_routing: bool = False,
        prompt: Prompt | None = None,
        prompt_text: str = "",
    ) -> None:
        """`prompt`: needed to show its logprobs; `prompt_text`: the echo."""
        self._tokenizer = tokenizer
        self._logprobs = LegacyLogprobs(tokenizer) if has_logprobs else None
        self._has_routing = has_routing
        self._prompt = prompt
        self._prompt_text = prompt_text
        self.echo_text = self._prompt_text if self._logprobs is None else ""
        self._scores: list[float] = []  # of the visible tokens, if they have any

    def take_echo(self) -> dict[str, Any]:
        text, self.echo_text = self.echo_text, ""
        return text_piece(text, routing=self._routing(()))

    def is_plain(self, delta: Delta) -> bool:
        """Whether a delta is one piece with nothing but a text."""
        has_details = self._logprobs is not None or self._has_routing
        return not has_details and delta.finished is None and delta.prompt is None

    def pieces(self, delta: Delta) -> list[dict[str, Any]]:
        """The pieces a delta gives, without their index."""
        if delta.prompt is not None:
            return self._echo_scored(delta.prompt)
        if delta.finished is not None:
            return [text_piece("", routing=self._routing(()), reason=finish_reason(delta.finished))]
        self._scores += [token.logprob.logprob for token in delta.tokens if token.logprob is not None]
        return [text_piece(delta.text, logprobs=self._render(delta.tokens), routing=self._routing(delta.tokens))]

    @property
    def mean_logprob(self) -> float:
        """Of the visible tokens, once all pieces are there; an answer without any comes after all others."""
        return math.fsum(self._scores) / len(self._scores) if self._scores else -math.inf

    def join(self, pieces: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """All pieces of the choice as one."""
        text = "".join(piece["text"] for piece in pieces)
        joined = self._render(())
        if joined is not None:
            for piece in pieces:
                for key, values in (piece["logprobs"] or {}).items():
                    joined[key] += values
        routing = [entry for piece in pieces for entry in piece["routing"]] if self._has_routing else None
        return text_piece(text, logprobs=joined, routing=routing, reason=pieces[-1]["finish_reason"])

    def _echo_scored(self, scored: tuple[TokenLogprob | None, ...]) -> list[dict[str, Any]]:
        if self._logprobs is None or self._prompt is None:  # scored only so that the request ends there
            return []
        start = self._prompt.num_start
        tokens = [
            ScoredToken(token_id, self._tokenizer.token_bytes(token_id), logprob)
            for token_id, logprob in zip(self._prompt.ids[start:], scored[start:], strict=True)
        ]
        logprobs = self._render(tokens)
        self._logprobs.end_prompt()
        return [text_piece(self._prompt_text, logprobs=logprobs, routing=self._routing(()))]

    def _render(self, tokens: Sequence[ScoredToken]) -> dict[str, Any] | None:
        return None if self._logprobs is None else self._logprobs.render(tokens)

    def _routing(self, tokens: Sequence[ScoredToken]) -> list[dict[str, Any]] | None:
        return routing_of(tokens) if self._has_routing else None


async def open_completion(services: Services, tenant: str, body: CompletionBody, arrival: Arrival) -> Completion:
    """Checks the body and submits its requests; errors become the answer's status."""
    services = await services.for_start(tenant, body.model, body.state)
    spec = await with_grammar(services, tenant, body.to_request(services.limits), arrival)
    state = await find_state(services, tenant, spec, arrival)
    prompts = [await read_after(services, state, text) for text in spec.prompts]
    starts = [
        await _start(services, tenant, body, spec, text, prompt) if state is None else start_after(state, prompt)
        for text, prompt in zip(spec.prompts, prompts, strict=True)
    ]
    envelope = Envelope.new("cmpl", model=services.model_name, system_fingerprint=services.system_fingerprint)
    group = submit_group(
        services, tenant, spec, starts, request_id=envelope.id, arrival=arrival, is_stream=body.stream
    )  # fmt: skip
    texts = [
        text
        for pair in zip(spec.prompts, prompts, strict=True)
        for text in _choice_texts(services.backend.tokenizer, body, *pair)
    ]
    return Completion(group, body, texts, envelope, returned_state(services, tenant, spec, starts[0], state))


async def _start(
    services: Services, tenant: str, body: CompletionBody, spec: RequestSpec, text: str | list[int], prompt: Prompt
) -> Start:
    """Where a prompt starts; scores are those of the whole prompt, so it is read as a whole."""
    return await services.prefix_resume.start(
        tenant,
        prompt.ids,
        max_tokens=spec.max_tokens,
        next_text=(lambda answer: text + answer) if isinstance(text, str) else None,
        is_wanted=body.cache_prompt and spec.prompt_logprobs is None and services.tenants.may_cache_prefixes(tenant),
    )


def _choice_texts(
    tokenizer: Tokenizer, body: CompletionBody, text: str | list[int], prompt: Prompt
) -> list[ChoiceText]:
    """The choices of one prompt."""
    prompt_text = "" if not body.echo else text if isinstance(text, str) else tokenizer.decode(text)
    return [
        ChoiceText(
            tokenizer,
            has_logprobs=body.logprobs is not None,
            has_routing=body.include_routing,
            prompt=prompt,
            prompt_text=prompt_text,
        )
        for _ in range(body.num_candidates)
    ]


def text_piece(
    text: str,
    *,
    logprobs: dict[str, Any] | None = None,
    routing: list[dict[str, Any]] | None = None,
    reason: str | None = None,
) -> dict[str, Any]:
    fields = {} if routing is None else {"routing": routing}
    return {"text": text, "logprobs": logprobs, "finish_reason": reason, **fields}
