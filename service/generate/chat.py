"""POST /v1/chat/completions as a use case: messages -> engine requests -> chat completion objects."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import AsyncGenerator, Sequence
from functools import partial
from typing import Any

from nsm_core.chat_template import ChatMessage, ChatTemplate
from nsm_core.engine.request import Finished
from nsm_core.thoughts import ThoughtReader
from nsm_core.tokenizer import Tokenizer
from service.deps import Arrival, Services
from service.generate.chat_calls import CallingChoice, ReadChoice
from service.generate.choices import RequestGroup, ends_of, submit_group
from service.generate.deltas import Delta, ScoredToken
from service.generate.group_answer import GroupAnswer
from service.generate.openai_format import Envelope, chat_logprobs, finish_reason, routing_of
from service.generate.starting import ReturnedState, find_state, read_after, returned_state, start_after
from service.generate.structured import with_grammar
from service.prompts import Prompt
from service.schemas.chat import ChatBody, core_messages
from service.schemas.common import RequestSpec
from service.state.message_border import num_opening
from service.stores.prefixes.resume import Start
from service.web.sse import TextFrame, frame

KIND = "chat.completion"
CHUNK_KIND = "chat.completion.chunk"


class Chat(GroupAnswer):
    def __init__(
        self,
        group: RequestGroup,
        body: ChatBody,
        template: ChatTemplate,
        tokenizer: Tokenizer,
        envelope: Envelope,
        returned: ReturnedState | None = None,
    ) -> None:
        super().__init__(group, body, envelope, returned, choices_per_prompt=body.n, chunk_kind=CHUNK_KIND)
        self._body = body
        self._tokenizer = tokenizer
        self._prefixes = [PrefixCutter(template.answer_prefix) for _ in range(body.n)]
        self._reading = [one for _ in range(body.n) if (one := _reading_of(body, template)) is not None]

    async def frames(self) -> AsyncGenerator[bytes, None]:
        """For each choice a role, its pieces, and one empty delta with the reason; then usage, if asked for."""
        choices = range(self._body.n)
        texts = [TextFrame(partial(self._text_frame, index)) for index in choices]
        has_running_usage = self._body.has_running_usage
        has_details = self._body.logprobs or self._body.include_routing or self._reading or has_running_usage
        if not has_details:
            self._show_directly(texts[0])
        yield b"".join(self._frame(index, {"role": "assistant", "content": ""}) for index in choices)
        async with contextlib.aclosing(self.group.batches()) as batches:
            async for batch in batches:
                frames = []
                for index, delta in batch:
                    if delta.finished is not None:
                        frames += self._last_frames(index, delta.finished)
                        continue
                    text = self._prefixes[index].cut(delta)
                    if self._reading:
                        frames += self._read_frames(index, text, self._prefixes[index].cut_tokens(delta))
                    elif self._body.logprobs or self._body.include_routing:
                        frames.append(
                            self._frame(index, {"content": text}, tokens=self._prefixes[index].cut_tokens(delta))
                        )
                    elif text:
                        frames.append(self._text_frame(index, text) if has_running_usage else texts[index](text))
                if frames:
                    yield b"".join(frames)
        async with contextlib.aclosing(self._frames_without_choices()) as last:
            async for data in last:
                yield data
                data = b""  # as in `until_done`

    async def collect(self) -> dict[str, Any]:
        """The whole answer as one object."""
        texts: list[list[str]] = [[] for _ in range(self._body.n)]
        tokens: list[list[ScoredToken]] = [[] for _ in range(self._body.n)]
        async with contextlib.aclosing(self.group.batches()) as batches:
            async for batch in batches:
                for index, delta in batch:
                    texts[index].append(self._prefixes[index].cut(delta))
                    tokens[index].extend(self._prefixes[index].cut_tokens(delta))
        ends = ends_of(self.group)
        choices = [
            {
                "index": index,
                "message": {"role": "assistant", **self._content(index, texts[index]), "refusal": None},
                "logprobs": self._logprobs(tokens[index]),
                "finish_reason": self._reason(index, ends[index]),
                **self._routing(tokens[index]),
            }
            for index in range(self._body.n)
        ]
        return self._envelope.wrap(KIND, choices, usage=self._usage(ends), **await self._state_field())

    def _read_frames(self, index: int, text: str, tokens: tuple[ScoredToken, ...]) -> list[bytes]:
        """Of a choice that may think or call tools. Tokens come with the first frame, or with one of their own."""
        has_details = bool(tokens) and (self._body.logprobs or self._body.include_routing)
        deltas = self._reading[index].feed(text) or ([{"content": ""}] if has_details else [])
        shown = tokens if has_details else ()
        return [self._frame(index, delta, tokens=() if number else shown) for number, delta in enumerate(deltas)]

    def _last_frames(self, index: int, end: Finished) -> list[bytes]:
        rest = self._reading[index].finish() if self._reading else []
        return [
            *(self._frame(index, delta) for delta in rest),
            self._frame(index, {}, reason=self._reason(index, end)),
        ]

    def _content(self, index: int, texts: list[str]) -> dict[str, Any]:
        if not self._reading:
            return {"content": "".join(texts)}
        self._reading[index].feed("".join(texts))
        self._reading[index].finish()
        return self._reading[index].message()

    def _reason(self, index: int, end: Finished) -> str:
        reason = finish_reason(end)
        return "tool_calls" if reason == "stop" and self._reading and self._reading[index].has_calls else reason

    def _frame(
        self, index: int, delta: dict[str, Any], *, tokens: tuple[ScoredToken, ...] = (), reason: str | None = None
    ) -> bytes:
        logprobs = self._logprobs(tokens) if tokens else None
        fields = {"logprobs": logprobs, "finish_reason": reason, **self._routing(tokens)}
        choice = {"index": index, "delta": delta, **fields}
        return frame(self._envelope.wrap(CHUNK_KIND, [choice], **self._chunk_usage()))

    def _text_frame(self, index: int, text: str) -> bytes:
        return self._frame(index, {"content": text})

    def _logprobs(self, tokens: tuple[ScoredToken, ...] | list[ScoredToken]) -> dict[str, Any] | None:
        return chat_logprobs(self._tokenizer, tokens) if self._body.logprobs else None

    def _routing(self, tokens: Sequence[ScoredToken]) -> dict[str, Any]:
        """The field, if it was asked for."""
        return {"routing": routing_of(tokens)} if self._body.include_routing else {}


def _reading_of(body: ChatBody, template: ChatTemplate) -> ReadChoice | None:
    """How a choice's text is read; None where it is shown as it is. `template`: that of the answer."""
    has_form = body.to_grammar() is not None
    calls = CallingChoice(is_either=has_form, form=template.tool_form) if body.tool_use.tools else None
    thoughts = ThoughtReader(is_open=template.reasoning == "open") if template.reasoning != "none" else None
    return None if calls is None and thoughts is None else ReadChoice(thoughts=thoughts, calls=calls)


class PrefixCutter:
    """Drops the template's own first characters from an answer, if the model wrote them."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._raw = prefix.encode()

    def cut(self, delta: Delta) -> str:
        """The delta's text, less the prefix at the very beginning; the prefix is one character or none."""
        if not delta.text:
            return ""
        prefix, self._prefix = self._prefix, ""
        return delta.text.removeprefix(prefix)

    def cut_tokens(self, delta: Delta) -> tuple[ScoredToken, ...]:
        """The delta's tokens, less the prefix. Tokens may come later than their text."""
        if not self._raw:
            return delta.tokens
        return tuple(self._cut_token(token) for token in delta.tokens)

    def _cut_token(self, token: ScoredToken) -> ScoredToken:
        if not (self._raw and token.raw):
            return token
        prefix, self._raw = self._raw, b""
        return dataclasses.replace(token, raw=token.raw.removeprefix(prefix))


async def open_chat(services: Services, tenant: str, body: ChatBody, arrival: Arrival) -> Chat:
    """Checks the body and submits its requests; errors become the answer's status."""
    services = await services.for_start(tenant, body.model, body.state)
    template = body.template_of_answer(services.chat_template)
    spec = await with_grammar(services, tenant, body.to_request(services.limits, template), arrival)
    state = await find_state(services, tenant, spec, arrival)
    text = spec.prompts[0]
    if state is not None and state.ends_with_answer:
        text = template.render_next(*core_messages(body.messages, template, body.tool_use.tools))
    prompt = await read_after(services, state, text, param="messages")
    start = (
        start_after(state, prompt)
        if state is not None
        else await _start(services, tenant, body, spec, prompt, template)
    )
    envelope = Envelope.new("chatcmpl", model=services.model_name, system_fingerprint=services.system_fingerprint)
    group = submit_group(
        services, tenant, spec, [start], request_id=envelope.id, arrival=arrival, is_stream=body.stream
    )  # fmt: skip
    returned = returned_state(services, tenant, spec, start, state)
    return Chat(group, body, template, services.backend.tokenizer, envelope, returned)


async def _start(
    services: Services, tenant: str, body: ChatBody, spec: RequestSpec, prompt: Prompt, template: ChatTemplate
) -> Start:
    return await services.prefix_resume.start(
        tenant,
        prompt.ids,
        max_tokens=spec.max_tokens,
        next_text=lambda answer: _next_text(template, body, answer),
        is_wanted=body.cache_prompt and services.tenants.may_cache_prefixes(tenant),
        num_opening=num_opening(services.backend.tokenizer, template, prompt.ids),
    )


def _next_text(template: ChatTemplate, body: ChatBody, answer: str) -> str:
    """What the chat's next prompt begins with if the client sends the answer back as it got it, without its thought."""
    text, reading = answer.removeprefix(template.answer_prefix), _reading_of(body, template)
    if reading is not None and not body.tool_use.tools:
        reading.feed(text)
        reading.finish()
        text = reading.message()["content"]
    said = ChatMessage("assistant", text)
    messages = core_messages(body.messages, template, body.tool_use.tools)
    return template.render([*messages, said, ChatMessage("user", "")])
