"""Validates requests before they enter the queue. Reads only; any thread may call it.

No torch here: a gateway on Triton servers applies the same rules.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping
from typing import Protocol

from nsm_core.engine.request import GenerationRequest, Resume
from nsm_core.errors import InvalidRequest, SnapshotCorrupt, StateMismatch
from nsm_core.sampling.counts import MAX_TOKEN_COUNT
from nsm_core.sampling.params import MAX_TOP_LOGPROBS, validate_for_vocab

MAX_POSITION = 2**62  # far below the end of int64, towards which a turn counts


class PositionReader(Protocol):
    """StateSpec, or StateLayout without torch."""

    def read_position(self, raw: bytes) -> int: ...


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RequestCheck:
    """Checks requests against one model."""

    vocab_size: int
    spec: PositionReader
    fingerprint: str

    def check(self, request: GenerationRequest) -> None:
        """Raises InvalidRequest, StateMismatch or SnapshotCorrupt."""
        self._check_prompt(request.prompt_ids)
        if request.sampled_ids:
            self._check_sampled(request)
        if request.keep_states_at:
            self._check_state_positions(request.keep_states_at, len(request.prompt_ids))
        validate_for_vocab(request.sampling, self.vocab_size)
        num_top = request.prompt_logprobs
        if num_top is not None and not 0 <= num_top <= MAX_TOP_LOGPROBS:
            raise InvalidRequest(
                f"prompt_logprobs must be in [0, {MAX_TOP_LOGPROBS}], got {num_top}", param="prompt_logprobs"
            )
        if request.resume is not None:
            self._check_resume(request.resume)
            if request.generated_counts:
                raise InvalidRequest("generated_counts belong to the resumed state", param="generated_counts")
        problem = self._counts_problem(request.generated_counts) if request.generated_counts else None
        if problem is not None:
            raise InvalidRequest(f"generated_counts {problem}", param="generated_counts")

    def _check_prompt(self, prompt_ids: tuple[int, ...]) -> None:
        if not prompt_ids:
            raise InvalidRequest("the prompt must have at least 1 token, got 0", param="prompt")
        for token_id in (min(prompt_ids), max(prompt_ids)):
            if not 0 <= token_id < self.vocab_size:
                raise InvalidRequest(
                    f"prompt token ids must be in [0, {self.vocab_size - 1}], got {token_id}", param="prompt"
                )

    def _check_sampled(self, request: GenerationRequest) -> None:
        num_sampled, max_tokens = len(request.sampled_ids), request.sampling.max_tokens
        if num_sampled > max_tokens:
            message = f"sampled_ids must be at most max_tokens ({max_tokens}), got {num_sampled}"
            raise InvalidRequest(message, param="sampled_ids")
        if any(not 0 <= token_id < self.vocab_size for token_id in request.sampled_ids):
            raise InvalidRequest(f"sampled_ids must be in [0, {self.vocab_size - 1}]", param="sampled_ids")
        if request.sampled_ids and request.prompt_logprobs is not None:
            raise InvalidRequest("prompt_logprobs cannot be combined with sampled_ids", param="prompt_logprobs")

    @staticmethod
    def _check_state_positions(positions: tuple[int, ...], prompt_len: int) -> None:
        is_rising = all(before < after for before, after in itertools.pairwise(positions))
        if not (is_rising and positions[0] >= 1 and positions[-1] <= prompt_len):
            raise InvalidRequest(
                f"keep_states_at must be rising numbers in [1, {prompt_len}], got {positions}", param="keep_states_at"
            )

    def _check_resume(self, resume: Resume) -> None:
        if resume.fingerprint != self.fingerprint:
            raise StateMismatch(f"the state was made by model {resume.fingerprint}, this is model {self.fingerprint}")
        position = resume.position if resume.held is not None else self.spec.read_position(resume.state)
        if position != resume.position:
            raise SnapshotCorrupt(f"the state stands at position {position}, expected {resume.position}")
        if not 0 <= position <= MAX_POSITION:  # draws count positions, and a client may have made the bytes
            raise SnapshotCorrupt(f"a state must stand at a position in [0, {MAX_POSITION}], got {position}")
        problem = self._counts_problem(resume.generated_counts)
        if problem is not None:
            raise SnapshotCorrupt(f"the state's generated_counts {problem}")

    def _counts_problem(self, generated_counts: Mapping[int, int]) -> str | None:
        for token_id, count in generated_counts.items():
            if not 0 <= token_id < self.vocab_size:
                return f"must name token ids in [0, {self.vocab_size - 1}], got {token_id}"
            if not 0 <= count <= MAX_TOKEN_COUNT:
                return f"must hold counts of at most {MAX_TOKEN_COUNT}, got {count} for token {token_id}"
        return None
