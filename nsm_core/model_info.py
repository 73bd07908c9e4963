"""What a server reports of its model. No torch here: a gateway whose models run elsewhere uses it too."""

from __future__ import annotations

import dataclasses

from nsm_core.state.layout import TensorLayout


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """What a client may know of the served model; `LoadedModel.info` makes it.

    `fingerprint`: hash over config, weights and tokenizer. `numerics`: device kind, dtype and kernel build, the class
    within which equal input gives equal bits. `state_bytes`: size of one state, constant for ever; `state_layout`: its
    tensors in order (`StateSpec.layout()`), for a snapshot's header. `replays_exactly`: a state that is made again by
    reading a log has the same bits, however the log was cut when it was read and sampled; `replays_singly`: for that,
    its sampled tokens are read one by one, as fast as they are sampled (`GenerationRequest.sampled_at`).
    """

    name: str
    fingerprint: str
    numerics: str
    created: int  # unix seconds
    vocab_size: int
    num_parameters: int
    state_bytes: int
    state_layout: tuple[TensorLayout, ...]
    chat_template: str
    replays_exactly: bool = False
    replays_singly: bool = False
