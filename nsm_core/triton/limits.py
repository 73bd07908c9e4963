"""Limits of one call to a worker. They free the slot of a client whose leaving Triton does not report."""

from __future__ import annotations

import dataclasses

from nsm_core.triton.config import WorkerConfig
from nsm_core.wire.calls import GenerateCall
from nsm_core.wire.tensors import INPUT_IDS, TEXT_INPUT, refuse


@dataclasses.dataclass(frozen=True, slots=True)
class CallLimits:
    """Raises InvalidRequest that names the field as the call has it."""

    config: WorkerConfig
    vocab_size: int

    def bounded(self, call: GenerateCall) -> GenerateCall:
        """The call, with the default time-out where it names none."""
        config = self.config
        if call.sampling.max_tokens > config.max_tokens_limit:
            refuse("max_tokens", f"in [1, {config.max_tokens_limit}]", call.sampling.max_tokens)
        if call.timeout_s is None:
            return dataclasses.replace(call, timeout_s=config.default_timeout_s)
        if call.timeout_s > config.max_timeout_s:
            refuse("timeout_s", f"in (0, {config.max_timeout_s:g}]", call.timeout_s)
        return call

    def check_ids(self, call: GenerateCall, prompt_ids: tuple[int, ...]) -> None:
        """`prompt_ids`: the call's own, or those of its text. The engine would refuse the same, by names of its own."""
        name, point = TEXT_INPUT if call.prompt_ids is None else INPUT_IDS, call.resume
        pending = None if point is None else point.pending
        if not prompt_ids and pending is None:
            refuse(name, "at least 1 token", "0 tokens")
        named = [(name, prompt_ids)]
        if point is not None:
            named.append(("resume.generated_counts", tuple(point.generated_counts)))
        if pending is not None:
            named.append(("resume.pending", (pending,)))
        for field, ids in named:
            for token_id in (min(ids, default=0), max(ids, default=0)):
                if not 0 <= token_id < self.vocab_size:
                    refuse(field, f"made of token ids in [0, {self.vocab_size - 1}]", token_id)
