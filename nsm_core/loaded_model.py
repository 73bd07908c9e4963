"""A model of any architecture, ready for an executor."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from nsm_core.model_info import ModelInfo
from nsm_core.state.spec import State, StateSpec

if TYPE_CHECKING:  # models run where no tokenizer is installed
    from nsm_core.tokenizer import Tokenizer


class SequenceModel(Protocol):
    """A model that can be served. Functional: it never modifies a state that it is given."""

    @property
    def state_spec(self) -> StateSpec: ...

    def initial_state(self, batch_size: int) -> State:
        """The start of a sequence, tensors [batch_size, *shape]."""
        ...

    def forward(self, ids: Tensor, state: State, lengths: Tensor | None = None) -> tuple[Tensor, State]:
        """ids [B,T], right-padded to `lengths` [B]; returns hidden [B,T,d] and the state after each row's end."""
        ...

    def step(self, ids: Tensor, state: State) -> tuple[Tensor, State]:
        """ids [B] -> hidden [B,d] and the new state."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [..., d] -> logits [..., V] fp32."""
        ...


ModelT_co = TypeVar("ModelT_co", bound=SequenceModel, covariant=True)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel(Generic[ModelT_co]):
    """A model ready to run, with everything that identifies it.

    `architecture`: its name in `nsm_core/architectures.py`. `device`: where its states are. `fingerprint`: hash over
    config, weights and tokenizer. `numerics`: the class within which equal input gives equal bits. `created`: unix
    seconds of the weights file. `weight_format`: of the large matrices in the file.
    """

    architecture: str
    model: ModelT_co
    device: torch.device
    tokenizer: Tokenizer
    chat_template: str
    fingerprint: str
    numerics: str
    name: str
    created: int
    num_parameters: int
    weight_format: str

    @property
    def info(self) -> ModelInfo:
        """The public description of the model."""
        spec = self.model.state_spec
        return ModelInfo(
            name=self.name,
            fingerprint=self.fingerprint,
            numerics=self.numerics,
            created=self.created,
            vocab_size=self.tokenizer.vocab_size,
            num_parameters=self.num_parameters,
            state_bytes=spec.num_bytes,
            state_layout=spec.layout(),
            chat_template=self.chat_template,
        )


def numerics_class(device: torch.device) -> str:
    """Device kind, dtype and kernel build of plain PyTorch, e.g. `cpu/fp32/torch-2.13.0+cpu/AVX2`."""
    build = torch.backends.cpu.get_cpu_capability() if device.type == "cpu" else torch.cuda.get_device_name(device)
    return f"{device.type}/fp32/torch-{torch.__version__}/{build}"
