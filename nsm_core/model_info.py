"""What whoever serves a model may tell of it. No torch here: a gateway whose models run elsewhere uses it too."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

from nsm_core.errors import InvalidRequest, StateMismatch

_TIER_MARK = "/"  # between a model's fingerprint and the number of states of a smaller form


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """What a client may know of the served model; `LoadedModel.info` makes it.

    `fingerprint`: hash over config, weights and tokenizer. `numerics`: device kind, dtype and kernel build, the class
    within which equal input gives equal bits. `state_bytes`: size of one state, constant for ever; `state_layout`: its
    tensors in order (`StateSpec.layout()`), for a snapshot's header. `num_states`: memory slots of a head; None where
    that is not known. `tiers`: smaller forms, which a session may ask for; each is a model of its own here, whose
    fingerprint names the form.
    """

    name: str
    fingerprint: str
    numerics: str
    created: int  # unix seconds
    vocab_size: int
    num_parameters: int
    state_bytes: int
    state_layout: tuple[Mapping[str, object], ...]
    chat_template: str
    num_states: int | None = None
    tiers: tuple[ModelInfo, ...] = ()

    def tier(self, num_states: int | None) -> ModelInfo:
        """The form with so many states; None: the whole. Raises InvalidRequest."""
        if num_states is None or num_states == self.num_states:
            return self
        found = next((tier for tier in self.tiers if tier.num_states == num_states), None)
        if found is None:
            known = [tier.num_states for tier in (*self.tiers, self) if tier.num_states is not None]
            raise unknown_tier(num_states, known)
        return found

    def form_of(self, fingerprint: str) -> ModelInfo:
        """The form that goes on with what was made under `fingerprint`: of this model, or of another one with as many
        states. Raises StateMismatch.
        """
        num_states = tier_size(fingerprint)
        if num_states is None:
            return self
        try:
            return self.tier(num_states)
        except InvalidRequest as error:
            raise StateMismatch(f"the state was made by model {fingerprint}, and {error}") from error


def tier_fingerprint(fingerprint: str, num_states: int) -> str:
    """The fingerprint of a model's form with fewer states."""
    return f"{fingerprint}{_TIER_MARK}{num_states}"


def tier_size(fingerprint: str) -> int | None:
    """The number of states of a smaller form; None for a whole model's fingerprint."""
    _, mark, size = fingerprint.rpartition(_TIER_MARK)
    return int(size) if mark and size.isdecimal() else None


def unknown_tier(num_states: int, known: Iterable[int]) -> InvalidRequest:
    """The answer to a wish for a form that there is not."""
    offered = ", ".join(map(str, known)) or "none"
    return InvalidRequest(
        f"num_states must be one of those that the model is served with ({offered}), got {num_states}",
        param="num_states",
    )
