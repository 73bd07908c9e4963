"""One small RWKV-7 model with random weights, in every layout that is read."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nsm_core.rwkv7.config import Rwkv7Config
from nsm_core.world_tokenizer import VOCABULARY_FILE
from tests.support.model_files import write_gguf, write_pth, write_safetensors
from tests.support.rwkv7 import random_tensors, small_config
from tests.support.world_vocabulary import world_tokenizer, world_tokens

CONFIG = small_config(vocab_size=640, width=64, num_layers=3, decay_rank=16, rate_rank=24, value_rank=8)
OLD_NAMES = {"receptance": "r_proj", "key": "k_proj", "value": "v_proj", "output": "o_proj", "ln_x": "g_norm"}
SHIFTS = "rwkvag"

Tensors = Mapping[str, Tensor]


def model_tensors(config: Rwkv7Config = CONFIG, *, seed: int = 0) -> dict[str, Tensor]:
    """In official names; with the first block's unused tensors, as the official files have them."""
    tensors = random_tensors(config, seed=seed)
    unused = {"v0": (1, 1, config.width), "v1": (config.width, 8), "v2": (8, config.width)}
    return tensors | {f"blocks.0.att.{name}": torch.zeros(shape) for name, shape in unused.items()}


def hugging_face_tensors(tensors: Tensors, *, is_fused: bool = False) -> dict[str, Tensor]:
    named: dict[str, Tensor] = {}
    for name, value in tensors.items():
        if name.startswith("blocks.0.att.v") and name[-1] in "012":
            continue
        if is_fused and ".att.x_" in name:
            continue
        other, turned = _hugging_face_name(name)
        named[other] = value.t() if turned else value.flatten() if other.endswith("bias") else value
    for layer in range(CONFIG.num_layers) if is_fused else ():
        parts = [tensors[f"blocks.{layer}.att.x_{letter}"].flatten() for letter in SHIFTS]
        named[f"model.layers.{layer}.attn.x_x"] = torch.stack(parts)
    return named


def _hugging_face_name(name: str) -> tuple[str, bool]:
    outside = {
        "emb.weight": "model.embeddings.weight",
        "head.weight": "lm_head.weight",
        "ln_out.weight": "model.norm.weight",
        "ln_out.bias": "model.norm.bias",
    }
    if name in outside:
        return outside[name], False
    _, layer, part, *rest = name.split(".")
    part = {"ln0": "pre_norm", "ln1": "attn_norm", "ln2": "ffn_norm", "att": "attn"}.get(part, part)
    turned = False
    if part == "attn" and len(rest[0]) == 2 and rest[0][1] in "012":
        letter, number = rest[0]
        rest = [f"{letter}_lora", "lora", *{"0": ("2", "bias"), "1": ("0", "weight"), "2": ("2", "weight")}[number]]
        turned = number != "0"
    elif part == "attn":
        rest[0] = OLD_NAMES.get(rest[0], rest[0])
    return ".".join(("model.layers", layer, part, *rest)), turned


def gguf_tensors(tensors: Tensors) -> dict[str, Tensor]:
    """As llama.cpp's converter writes them, with dummies for the first block's value residual."""
    outside = {
        "emb.weight": "token_embd.weight",
        "head.weight": "output.weight",
        **{f"blocks.0.ln0.{part}": f"token_embd_norm.{part}" for part in ("weight", "bias")},
        **{f"ln_out.{part}": f"output_norm.{part}" for part in ("weight", "bias")},
    }
    named: dict[str, Tensor] = {}
    for name, value in tensors.items():
        if name in outside:
            named[outside[name]] = value
            continue
        _, layer, part, *rest = name.split(".")
        at = f"blk.{layer}."
        if part in ("ln1", "ln2"):
            named[f"{at}{'attn_norm' if part == 'ln1' else 'attn_norm_2'}.{rest[0]}"] = value
        elif part == "ffn":
            named[f"{at}channel_mix_{'lerp_k' if rest[0] == 'x_k' else rest[0]}.weight"] = value
        elif rest[0] == "ln_x":
            named[f"{at}time_mix_ln.{rest[1]}"] = value
        elif not rest[0].startswith("x_"):
            is_turned = len(rest[0]) == 2 and rest[0][1] in "12"
            named[f"{at}time_mix_{rest[0]}.weight"] = value.t() if is_turned else value.squeeze()
    for layer in range(CONFIG.num_layers):
        named[f"blk.{layer}.time_mix_r_k.weight"] = tensors[f"blocks.{layer}.att.r_k"].flatten()
        parts = [tensors[f"blocks.{layer}.att.x_{letter}"] for letter in SHIFTS]
        named[f"blk.{layer}.time_mix_lerp_fused.weight"] = torch.stack(parts)
    return {name: value.contiguous() for name, value in named.items()}


def gguf_keys(config: Rwkv7Config = CONFIG) -> dict[str, Any]:
    tokens = world_tokens()
    literals = ["<s>", *(repr(tokens[token_id])[2:-1] for token_id in range(1, max(tokens) + 1))]
    padding = config.vocab_size - len(literals)
    return {
        "rwkv7.block_count": config.num_layers,
        "rwkv7.embedding_length": config.width,
        "rwkv7.wkv.head_size": config.head_size,
        "rwkv7.attention.layer_norm_epsilon": 1e-5,
        "tokenizer.ggml.model": "rwkv",
        "tokenizer.ggml.tokens": literals + [f"[PAD{index}]" for index in range(padding)],
        "tokenizer.ggml.token_type": [3] + [1] * (len(literals) - 1) + [5] * padding,
        "tokenizer.chat_template": "rwkv-world",
    }


def hugging_face_config(config: Rwkv7Config = CONFIG, **changes: Any) -> dict[str, Any]:
    return {
        "architectures": ["RWKV7ForCausalLM"],
        "model_type": "rwkv7",
        "hidden_size": config.width,
        "num_hidden_layers": config.num_layers,
        "head_dim": config.head_size,
        "norm_eps": 1e-5,
        "hidden_act": "sqrelu",
        "attn": None,
        "vocab_size": config.vocab_size,
    } | changes


def with_vocabulary(path: Path) -> Path:
    """Puts the vocabulary beside a file, or into a directory."""
    world_tokenizer().save((path if path.is_dir() else path.parent) / VOCABULARY_FILE)
    return path


def write_hugging_face(directory: Path, tensors: Tensors, *, num_parts: int = 1, **changes: Any) -> Path:
    """A directory of one file of weights, or of several with an index."""
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(hugging_face_config(**changes)))
    if num_parts == 1:
        write_safetensors(directory / "model.safetensors", tensors)
        return with_vocabulary(directory)
    weight_map = {}
    for part in range(num_parts):
        file = f"model-{part + 1:05}-of-{num_parts:05}.safetensors"
        names = list(tensors)[part::num_parts]
        write_safetensors(directory / file, {name: tensors[name] for name in names})
        weight_map |= dict.fromkeys(names, file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return with_vocabulary(directory)


def web_rwkv_tensors(tensors: Tensors) -> dict[str, Tensor]:
    """Official names, with the small matrices transposed and no dimensions of size 1."""
    small = [f".att.{letter}{part}" for letter in "wavg" for part in "12"]
    return {name: value.t() if name.endswith(tuple(small)) else value.squeeze() for name, value in tensors.items()}


WRITERS: dict[str, Callable[[Path, Tensors], Path]] = {
    "pth": lambda folder, tensors: with_vocabulary(write_pth(folder / "model.pth", tensors)),
    "safetensors": lambda folder, tensors: with_vocabulary(write_safetensors(folder / "model.safetensors", tensors)),
    "st": lambda folder, tensors: with_vocabulary(write_safetensors(folder / "model.st", web_rwkv_tensors(tensors))),
    "folder of one file": lambda folder, tensors: with_vocabulary(write_pth(folder / "model.pth", tensors)).parent,
    "hugging face": lambda folder, tensors: write_hugging_face(folder / "hf", hugging_face_tensors(tensors)),
    "hugging face in parts": lambda folder, tensors: write_hugging_face(
        folder / "hf", hugging_face_tensors(tensors), num_parts=3
    ),
    "hugging face with fused shifts": lambda folder, tensors: write_hugging_face(
        folder / "hf", hugging_face_tensors(tensors, is_fused=True)
    ),
    "gguf": lambda folder, tensors: write_gguf(folder / "model.gguf", gguf_tensors(tensors), gguf_keys()),
}
