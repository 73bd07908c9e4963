"""Where a response's turn begins: a chain of responses as a position in a session's token log.

A chain runs on one session while its turns follow each other. Instructions are no part of the chain. A turn with
instructions runs on a session of its own, which reads them before the chain's text; later turns with the same
instructions continue there. The first turn without instructions continues the chain, and reads the turns in between.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from nsm_core.chat_template import ChatTemplate
from service.deps import TenantScope
from service.named_states.start_state import StartState
from service.schemas.items import Item, messages_of
from service.state.message_border import MessageBorder, opening_of_turn
from service.stores.sessions.base import LogPoint


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LogPosition:
    """The end of one turn of a session."""

    session_id: str
    version: int
    num_log_tokens: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """What the next turn inherits.

    `end`: the end of the newest turn. Its log holds `num_instruction_tokens` of `instructions` after the token that
    starts a text. `plain`: the newest position whose log is the start of the chain, without any instructions; None when
    there is none, and when `end` is one itself. `border`: where its answer began with a thought, which the next turn
    does not stand on.
    """

    end: LogPosition
    instructions: str | None = None
    num_instruction_tokens: int = 0
    plain: LogPosition | None = None
    border: MessageBorder | None = None

    @property
    def session_ids(self) -> set[str]:
        """The sessions it needs."""
        return {position.session_id for position in (self.end, self.plain) if position is not None}

    @property
    def next_start(self) -> LogPosition:
        """What the next turn stands on."""
        if self.border is None:
            return self.end
        point = self.border.point
        return LogPosition(session_id=self.end.session_id, version=point.version, num_log_tokens=point.num_log_tokens)

    @property
    def plain_end(self) -> LogPosition | None:
        return self.next_start if self.instructions is None else self.plain

    def to_document(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> Chain:
        positions = {
            name: None if document[name] is None else LogPosition(**document[name]) for name in ("end", "plain")
        }
        border = document.get("border")
        return cls(**{**document, **positions, "border": None if border is None else _border_of(border)})


def _border_of(document: Mapping[str, Any]) -> MessageBorder:
    return MessageBorder(**{**document, "point": LogPoint(**document["point"])})


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TurnPlan:
    """A turn on the session at `start` (None: on a new one, from `state` if there is one) that reads `input_ids`.

    `after`, `num_opening`: see TurnRequest. The rest is of the chain after it.
    """

    start: LogPosition | None
    input_ids: tuple[int, ...]
    after: LogPoint | None = None
    num_opening: int | None = None
    instructions: str | None = None
    num_instruction_tokens: int = 0
    plain: LogPosition | None = None
    state: StartState | None = None

    @property
    def stands_on(self) -> LogPosition | None:
        """What the turn's log begins with; None on a new session."""
        if self.start is None or self.after is None:
            return self.start
        after = self.after
        return dataclasses.replace(self.start, version=after.version, num_log_tokens=after.num_log_tokens)

    def chain_to(self, end: LogPosition) -> Chain:
        """The chain when this turn ended at `end`."""
        return Chain(
            end=end,
            instructions=self.instructions,
            num_instruction_tokens=self.num_instruction_tokens,
            plain=self.plain,
        )


async def plan_turn(
    scope: TenantScope,
    base: Chain | None,
    template: ChatTemplate,
    *,
    instructions: str | None,
    items: Sequence[Item],
) -> TurnPlan:
    """The turn that reads `items` after `base` (None: after nothing). `template`: that of the answer.

    Raises NotFound or InvalidRequest.
    """
    if base is not None and base.border is not None and _text_after(base.border, template, items) is None:
        base = dataclasses.replace(base, border=None)  # the template needs the thought
    encoder = scope.services.prompts
    text_ids = await encoder.encode(_text(template, base, items), param="input")
    if base is not None and base.instructions == instructions:
        plan = _plan_on(base, text_ids)
    else:
        preface = None
        if instructions is not None:
            preface = await encoder.encode(template.render_preface(instructions), param="instructions")
        plan = _plan_beside(base, await _chain_ids(scope, base), text_ids, instructions, preface)
    num_opening = opening_of_turn(scope.services.backend.tokenizer, template, plan.input_ids)
    return dataclasses.replace(plan, num_opening=num_opening)


def _plan_on(base: Chain, text_ids: Sequence[int]) -> TurnPlan:
    """On the session of `base`, whose instructions stay."""
    return TurnPlan(
        start=base.end,
        after=None if base.border is None else base.border.point,
        input_ids=tuple(text_ids),
        instructions=base.instructions,
        num_instruction_tokens=base.num_instruction_tokens,
        plain=base.plain,
    )


def _plan_beside(
    base: Chain | None,
    chain_ids: Sequence[int],
    text_ids: Sequence[int],
    instructions: str | None,
    preface: Sequence[int] | None,
) -> TurnPlan:
    """Where the chain was left without instructions, or with a `preface` of other ones on a new session."""
    plain = None if base is None else base.plain_end
    if preface is None:
        num_read = 0 if plain is None else plain.num_log_tokens
        return TurnPlan(start=plain, input_ids=(*chain_ids[num_read:], *text_ids))
    return TurnPlan(
        start=None,
        input_ids=(chain_ids[0], *preface, *chain_ids[1:], *text_ids),
        instructions=instructions,
        num_instruction_tokens=len(preface),
        plain=plain,
    )


async def plan_first_turn(
    scope: TenantScope, state: StartState, template: ChatTemplate, *, items: Sequence[Item]
) -> TurnPlan:
    """The first turn of a chain that begins from `state`. Raises InvalidRequest."""
    messages = messages_of(items, template.tool_form)
    text = template.render_next(*messages) if state.ends_with_answer else template.render(messages)
    ids = await scope.services.prompts.encode(text, param="input")
    num_opening = opening_of_turn(scope.services.backend.tokenizer, template, ids)
    return TurnPlan(start=None, input_ids=tuple(ids), state=state, num_opening=num_opening)


def _text_after(border: MessageBorder, template: ChatTemplate, items: Sequence[Item]) -> str | None:
    return border.render_next(template, messages_of(items, template.tool_form))


def _text(template: ChatTemplate, base: Chain | None, items: Sequence[Item]) -> str:
    messages = messages_of(items, template.tool_form)
    if base is not None and base.border is not None:
        return _text_after(base.border, template, items) or ""
    return template.render(messages) if base is None else template.render_next(*messages)


async def _chain_ids(scope: TenantScope, base: Chain | None) -> tuple[int, ...]:
    """The chain without instructions, from the token that starts a text."""
    if base is None:
        return (scope.services.backend.tokenizer.end_of_text_id,)
    key = scope.session_key(base.end.session_id)
    log_ids = await scope.services.store.read_log(key, stop=base.next_start.num_log_tokens)
    return (log_ids[0], *log_ids[1 + base.num_instruction_tokens :])
