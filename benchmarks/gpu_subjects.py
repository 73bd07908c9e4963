"""The models that `benchmarks.gpu_models` compares, behind one interface: ours, and public ones of the same shape.

All have 8 layers of width 512, a vocabulary of 8,192 and 31.6 to 34.7 million parameters (fewer with `tiny`). Ours
train as `nsm train` does: fp32 weights under bf16 autocast, blocks compiled; they are served with bf16 weights except
the router and the learned states. The public models get what is fastest for them, bf16 weights throughout, and run as
published: their kernels are fused already. Eager decoding and prefill for all.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nsm_core.config import ModelConfig
from nsm_core.model.nsm import NsmModel
from nsm_core.model.router import Router
from nsm_core.state.spec import POSITION
from nsm_lab.training.presets import PRESETS

PREFILL_PIECE = 32768  # tokens in one call of our recurrent models; attention over a whole prompt reads it in one
DECODE_CONTEXT = 2048  # tokens in the caches of models that have them
TINY = {"d_model": 64, "num_layers": 2, "num_heads": 2, "num_kv_heads": 2, "mlp_hidden": 128, "vocab_size": 256}

Work = Callable[[], object]


class Subject(abc.ABC):
    """A model under measurement; every method builds it anew, so that nothing is left of the cell before."""

    vocab_size: int

    @abc.abstractmethod
    def training(self, ids: Tensor) -> tuple[nn.Module, Callable[[], Tensor]]:
        """The module, and its loss on ids [B,T]."""

    @abc.abstractmethod
    def prefill(self, ids: Tensor) -> Work:
        """Reads ids [1,T]: logits of the last token, and the state or cache."""

    @abc.abstractmethod
    def decode(self, ids: Tensor) -> Work:
        """One more token [B] for every row, on top of the step before."""


def autocast(device: torch.device) -> torch.autocast:
    return torch.autocast(device.type, torch.bfloat16)


class OwnSubject(Subject):
    """A model of `nsm_core`, by its preset."""

    def __init__(self, preset: str, tiny: bool) -> None:
        config = PRESETS[preset]
        self.config = dataclasses.replace(config, **TINY) if tiny else config
        self.vocab_size = self.config.vocab_size

    def _build(self, device: torch.device, context: int) -> NsmModel:
        sees_all = "A" in self.config.layer_pattern
        config: ModelConfig = dataclasses.replace(self.config, max_context=context) if sees_all else self.config
        return NsmModel(config).to(device)

    def training(self, ids: Tensor) -> tuple[nn.Module, Callable[[], Tensor]]:
        model = self._build(ids.device, ids.shape[1]).train()
        if ids.is_cuda:
            for block in model.layers:
                block.compile(dynamic=False)
        targets = ids.roll(-1, dims=1).flatten()

        def loss() -> Tensor:
            with autocast(ids.device):
                hidden, _ = model.read(ids, model.initial_state(len(ids)), is_fresh=True)
                return F.cross_entropy(model.logits(hidden).flatten(0, 1), targets)

        return model, loss

    def prefill(self, ids: Tensor) -> Work:
        model = to_serving_precision(self._build(ids.device, ids.shape[1]))
        is_one_call = "A" in model.config.layer_pattern
        pieces = [ids] if is_one_call else ids.split(PREFILL_PIECE, dim=1)

        def work() -> Tensor:
            state = model.initial_state(len(ids))
            for piece in pieces:
                hidden, state = model.read(piece, state, is_fresh=is_one_call)
            return model.logits(hidden[:, -1])

        return without_gradients(work, ids.device)

    def decode(self, ids: Tensor) -> Work:
        model = to_serving_precision(self._build(ids.device, DECODE_CONTEXT))
        state = model.initial_state(len(ids))
        state = {name: value if name == POSITION else torch.randn_like(value) for name, value in state.items()}
        state[POSITION] += DECODE_CONTEXT

        def work() -> Tensor:
            hidden, new_state = model.step(ids, state)
            state.update(new_state)
            return model.logits(hidden)

        return without_gradients(work, ids.device)


def to_serving_precision(model: NsmModel) -> NsmModel:
    """bf16 weights; the router, the convolution and the learned states stay fp32 (docs/model.md)."""
    routed = {id(part) for router in model.modules() if isinstance(router, Router) for part in router.modules()}
    for part in model.modules():
        if isinstance(part, nn.Linear | nn.Embedding | nn.RMSNorm) and id(part) not in routed:
            part.to(torch.bfloat16)
    return model.eval()


def without_gradients(work: Work, device: torch.device) -> Work:
    def wrapped() -> object:
        with torch.inference_mode(), autocast(device):
            return work()

    return wrapped


class PublicSubject(Subject):
    """A causal language model with the interface of the `transformers` library."""

    def __init__(self, build: Callable[[dict[str, Any]], nn.Module], tiny: bool) -> None:
        self._build_from, self.vocab_size = build, 256 if tiny else 8192
        self._shape = {
            "hidden_size": 64 if tiny else 512,
            "num_hidden_layers": 2 if tiny else 8,
            "vocab_size": self.vocab_size,
            "tie_word_embeddings": True,
            "max_position_embeddings": 131072,
        }

    def _build(self, device: torch.device) -> nn.Module:
        return self._build_from(dict(self._shape)).to(device, torch.bfloat16)

    def training(self, ids: Tensor) -> tuple[nn.Module, Callable[[], Tensor]]:
        model = self._build(ids.device).train()
        return model, lambda: model(input_ids=ids, labels=ids, use_cache=False).loss

    def prefill(self, ids: Tensor) -> Work:
        model = self._build(ids.device).eval()

        @torch.inference_mode()
        def work() -> object:
            return model(input_ids=ids, use_cache=True, logits_to_keep=1).logits

        return work

    def decode(self, ids: Tensor) -> Work:
        model = self._build(ids.device).eval()
        cache = self._first_cache(model, ids)

        @torch.inference_mode()
        def work() -> object:
            nonlocal cache
            out = model(input_ids=ids[:, None], past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            return out.logits

        return work

    def _first_cache(self, model: nn.Module, ids: Tensor) -> Any:
        """What a first token leaves: a recurrent state has its full size at once."""
        with torch.inference_mode():
            return model(input_ids=ids[:, None], use_cache=True).past_key_values


class LlamaSubject(PublicSubject):
    """The attention model of the `transformers` library, its cache filled to DECODE_CONTEXT."""

    def _first_cache(self, model: nn.Module, ids: Tensor) -> Any:
        from transformers import DynamicCache

        config: Any = model.config
        cache = DynamicCache()
        shape = (len(ids), config.num_key_value_heads, DECODE_CONTEXT, config.hidden_size // config.num_attention_heads)
        for layer in range(config.num_hidden_layers):
            keys, values = torch.randn(2, *shape, dtype=torch.bfloat16, device=ids.device).unbind(0)
            cache.update(keys, values, layer)
        return cache


def _llama(shape: dict[str, Any]) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    width = int(shape["hidden_size"])
    config = LlamaConfig(
        **shape, num_attention_heads=width // 64, intermediate_size=width * 7 // 2, attn_implementation="sdpa"
    )
    model: nn.Module = LlamaForCausalLM(config)
    return model


def _gla(shape: dict[str, Any]) -> nn.Module:
    from fla.models import GLAConfig, GLAForCausalLM

    model: nn.Module = GLAForCausalLM(GLAConfig(**shape))
    return model


def _gsa(shape: dict[str, Any]) -> nn.Module:
    """With our number of heads and slots, so that the states have equal sizes."""
    from fla.models import GSAConfig, GSAForCausalLM

    heads = int(shape["hidden_size"]) // 64
    model: nn.Module = GSAForCausalLM(GSAConfig(**shape, num_heads=heads, num_slots=64))
    return model


SUBJECTS: dict[str, Callable[[bool], Subject]] = {
    "pulse": lambda tiny: OwnSubject("base", tiny),
    "hybrid": lambda tiny: OwnSubject("hybrid", tiny),
    "transformer": lambda tiny: OwnSubject("transformer", tiny),
    "llama": lambda tiny: LlamaSubject(_llama, tiny),
    "fla-gla": lambda tiny: PublicSubject(_gla, tiny),
    "fla-gsa": lambda tiny: PublicSubject(_gsa, tiny),
}


def keep_few_configurations(limit: int) -> None:
    """Of each autotuned public kernel's configurations only `limit` are tried, evenly spaced over its list.

    Compiling all of them takes many minutes a model. Must run before those kernels are imported.
    """
    from triton.runtime.autotuner import Autotuner

    original = Autotuner.__init__

    def init(self: Any, fn: Any, arg_names: Any, configs: Any, *args: Any, **kwargs: Any) -> None:
        configs = list(configs or ())
        chosen = [configs[i * len(configs) // limit] for i in range(limit)] if len(configs) > limit else configs
        original(self, fn, arg_names, chosen, *args, **kwargs)

    Autotuner.__init__ = init
