"""Models whose memory is known: they say what comes next from what they have read, or nothing at all."""

from __future__ import annotations

import numpy as np
import torch

from nsm_core.state.spec import State, StateSpec, TensorSpec

VOCAB = 512
CAPACITY = 8192  # tokens of a text


class Memory(torch.nn.Module):
    """Predicts what followed the last three tokens before, if that was within the last `span` tokens, else nothing.

    Nothing is the same probability for every token, or, with `noise`, one that depends on the last token alone.
    """

    state_spec = StateSpec((TensorSpec("position", (), torch.int64), TensorSpec("text", (CAPACITY,), torch.float32)))

    def __init__(self, span: int, *, noise: bool = False) -> None:
        super().__init__()
        self.span = span
        generator = torch.Generator().manual_seed(0)
        self.prior = torch.randn(VOCAB, VOCAB, generator=generator) if noise else torch.zeros(VOCAB, VOCAB)

    def initial_state(self, batch_size: int) -> State:
        return self.state_spec.zeros(batch_size)

    def step(self, ids: torch.Tensor, state: State) -> tuple[torch.Tensor, State]:
        hidden, state = self.forward(ids[:, None], state)
        return hidden[:, 0], state

    def forward(
        self, ids: torch.Tensor, state: State, lengths: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, State]:
        """Hidden vectors are logits."""
        position, text = state["position"].clone(), state["text"].clone()
        hidden = self.prior[ids].clone()
        for row, start in enumerate(position.tolist()):
            text[row, start : start + ids.shape[1]] = ids[row]
            read = text[row, : start + ids.shape[1]].long().tolist()
            latest: dict[tuple[int, ...], int] = {}
            for index in range(2, len(read)):
                last = tuple(read[index - 2 : index + 1])
                if index >= start and last in latest and index - latest[last] <= self.span:
                    hidden[row, index - start, read[latest[last] + 1]] = 40.0
                latest[last] = index
        return hidden, {"position": position + ids.shape[1], "text": text}

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden


def random_texts(count: int, length: int, *, seed: int = 0) -> list[np.ndarray]:
    """Nothing can be guessed in them but what is repeated."""
    rng = np.random.default_rng(seed)
    return [rng.integers(100, VOCAB, length) for _ in range(count)]
