"""Random weights of pulse-books' size for llama.cpp: Llama, RWKV-7 and Mamba-2 as GGUF files in Q8_0.

`python -m benchmarks.peers.models DIRECTORY` in an environment with `gguf` (`benchmarks.peers.build_llama` makes one).
They are for speed only: what they write is noise. Width, vocabulary and the number of weights that a token passes are
pulse-books'; depth and feed-forward width are what each family needs to get there. So is the tokenizer.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

WIDTH, VOCAB_SIZE, MAX_CONTEXT = 512, 8192, 131_072
LLAMA_LAYERS, LLAMA_HEADS, LLAMA_HIDDEN = 8, 8, 1792
RWKV_LAYERS, RWKV_HEAD_DIM, RWKV_HIDDEN = 8, 64, 2496
# Ranks as its authors derive them from the width
RWKV_RANK, RWKV_GATE_RANK = 32, 96
MAMBA_LAYERS, MAMBA_INNER, MAMBA_STATE, MAMBA_HEADS, MAMBA_TAPS = 18, 1024, 128, 16, 4
MAMBA_CONV = MAMBA_INNER + 2 * MAMBA_STATE
SPREAD = 0.02  # of the random numbers
TOKENIZER = Path(__file__).parents[2] / "nsm_core/model/checkpoints/pulse-books/tokenizer.json"
MATRIX, FLOATS = "Q8_0", "F32"
# Files that llama.cpp's own quantiser makes of a peer in fp32, and the format of each
QUANTISED = {"llama-q4_0": ("llama", "Q4_0"), "llama-q4_k_m": ("llama", "Q4_K_M")}


@dataclasses.dataclass(frozen=True, slots=True)
class Tensor:
    """`shape`: rows first. `kind`: MATRIX or FLOATS; `middle`: what its random numbers lie around."""

    name: str
    shape: tuple[int, ...]
    kind: str = FLOATS
    middle: float = 0.0

    @property
    def size(self) -> int:
        return math.prod(self.shape)


@dataclasses.dataclass(frozen=True, slots=True)
class Peer:
    """A family. `tensors`: weights, in the file's order; `keys`: of its header, without the family's name in front."""

    family: str
    tensors: Callable[[], Iterator[Tensor]]
    keys: dict[str, int | float]

    @property
    def num_weights(self) -> int:
        """Those that one token passes: an embedding that is only looked up is not among them."""
        tensors = {tensor.name: tensor.size for tensor in self.tensors()}
        return sum(tensors.values()) - ("output.weight" in tensors) * tensors["token_embd.weight"]


def llama_tensors() -> Iterator[Tensor]:
    yield Tensor("token_embd.weight", (VOCAB_SIZE, WIDTH), MATRIX)
    yield _norm("output_norm.weight")
    for layer in range(LLAMA_LAYERS):
        at = f"blk.{layer}."
        yield _norm(f"{at}attn_norm.weight")
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            yield Tensor(f"{at}{name}.weight", (WIDTH, WIDTH), MATRIX)
        yield _norm(f"{at}ffn_norm.weight")
        for name in ("ffn_gate", "ffn_up"):
            yield Tensor(f"{at}{name}.weight", (LLAMA_HIDDEN, WIDTH), MATRIX)
        yield Tensor(f"{at}ffn_down.weight", (WIDTH, LLAMA_HIDDEN), MATRIX)


def rwkv_tensors() -> Iterator[Tensor]:
    for name in ("token_embd.weight", "output.weight"):
        yield Tensor(name, (VOCAB_SIZE, WIDTH), MATRIX)
    yield from (*_norm_and_bias("token_embd_norm"), *_norm_and_bias("output_norm"))
    for layer in range(RWKV_LAYERS):
        at = f"blk.{layer}."
        yield from (*_norm_and_bias(f"{at}attn_norm"), *_norm_and_bias(f"{at}attn_norm_2"))
        yield from _rwkv_time_mix(f"{at}time_mix_")
        yield Tensor(f"{at}channel_mix_lerp_k.weight", (1, 1, WIDTH))
        yield Tensor(f"{at}channel_mix_key.weight", (RWKV_HIDDEN, WIDTH), MATRIX)
        yield Tensor(f"{at}channel_mix_value.weight", (WIDTH, RWKV_HIDDEN), MATRIX)


def _rwkv_time_mix(at: str) -> Iterator[Tensor]:
    for letter in "wav":
        kind = FLOATS if letter == "w" else MATRIX  # as llama.cpp's converter does
        yield Tensor(f"{at}{letter}0.weight", (WIDTH,))
        yield Tensor(f"{at}{letter}1.weight", (RWKV_RANK, WIDTH), kind)
        yield Tensor(f"{at}{letter}2.weight", (WIDTH, RWKV_RANK), kind)
    yield Tensor(f"{at}g1.weight", (RWKV_GATE_RANK, WIDTH), MATRIX)
    yield Tensor(f"{at}g2.weight", (WIDTH, RWKV_GATE_RANK), MATRIX)
    yield Tensor(f"{at}lerp_fused.weight", (6, 1, 1, WIDTH))
    for name in ("k_k", "k_a", "r_k"):
        yield Tensor(f"{at}{name}.weight", (WIDTH,))
    for name in ("key", "value", "receptance", "output"):
        yield Tensor(f"{at}{name}.weight", (WIDTH, WIDTH), MATRIX)
    yield from _norm_and_bias(f"{at}ln")


def mamba_tensors() -> Iterator[Tensor]:
    yield Tensor("token_embd.weight", (VOCAB_SIZE, WIDTH), MATRIX)
    yield _norm("output_norm.weight")
    for layer in range(MAMBA_LAYERS):
        at = f"blk.{layer}."
        yield _norm(f"{at}attn_norm.weight")
        yield Tensor(f"{at}ssm_in.weight", (MAMBA_INNER + MAMBA_CONV + MAMBA_HEADS, WIDTH), MATRIX)
        yield Tensor(f"{at}ssm_conv1d.weight", (MAMBA_CONV, MAMBA_TAPS))
        yield Tensor(f"{at}ssm_conv1d.bias", (MAMBA_CONV,))
        yield Tensor(f"{at}ssm_dt.bias", (MAMBA_HEADS,))
        yield Tensor(f"{at}ssm_a", (MAMBA_HEADS, 1), middle=-1.0)
        yield Tensor(f"{at}ssm_d", (MAMBA_HEADS, 1))
        yield Tensor(f"{at}ssm_norm.weight", (1, MAMBA_INNER), middle=1.0)
        yield Tensor(f"{at}ssm_out.weight", (WIDTH, MAMBA_INNER), MATRIX)


def _norm(name: str) -> Tensor:
    return Tensor(name, (WIDTH,), middle=1.0)


def _norm_and_bias(name: str) -> tuple[Tensor, Tensor]:
    return _norm(f"{name}.weight"), Tensor(f"{name}.bias", (WIDTH,))


PEERS = {
    "llama": Peer(
        "llama",
        llama_tensors,
        {
            "block_count": LLAMA_LAYERS,
            "feed_forward_length": LLAMA_HIDDEN,
            "attention.head_count": LLAMA_HEADS,
            "attention.head_count_kv": LLAMA_HEADS,
            "attention.layer_norm_rms_epsilon": 1e-6,
            "rope.dimension_count": WIDTH // LLAMA_HEADS,
            "rope.freq_base": 10_000.0,
            "vocab_size": VOCAB_SIZE,
        },
    ),
    "rwkv7": Peer(
        "rwkv7",
        rwkv_tensors,
        {
            "block_count": RWKV_LAYERS,
            "feed_forward_length": RWKV_HIDDEN,
            "attention.head_count": 0,
            "attention.layer_norm_epsilon": 1e-5,
            "wkv.head_size": RWKV_HEAD_DIM,
            "attention.decay_lora_rank": RWKV_RANK,
            "attention.iclr_lora_rank": RWKV_RANK,
            "attention.value_residual_mix_lora_rank": RWKV_RANK,
            "attention.gate_lora_rank": RWKV_GATE_RANK,
        },
    ),
    "mamba2": Peer(
        "mamba2",
        mamba_tensors,
        {
            "block_count": MAMBA_LAYERS,
            "feed_forward_length": 0,
            "attention.head_count": 0,
            "attention.layer_norm_rms_epsilon": 1e-6,
            "ssm.conv_kernel": MAMBA_TAPS,
            "ssm.inner_size": MAMBA_INNER,
            "ssm.state_size": MAMBA_STATE,
            "ssm.time_step_rank": MAMBA_HEADS,
            "ssm.group_count": 1,
        },
    ),
}


def write_model(peer: Peer, file: Path, *, matrices: str = MATRIX, tokenizer: Path = TOKENIZER) -> None:
    """`matrices`: MATRIX or FLOATS. Raises ImportError without `gguf`, OSError."""
    import gguf
    import numpy as np

    writer = gguf.GGUFWriter(file, peer.family)
    writer.add_name(f"random {peer.family}, speed only")
    for key, value in {"context_length": MAX_CONTEXT, "embedding_length": WIDTH, **peer.keys}.items():
        (writer.add_float32 if isinstance(value, float) else writer.add_uint32)(f"{peer.family}.{key}", value)
    is_whole = matrices == FLOATS
    writer.add_file_type(gguf.LlamaFileType.ALL_F32 if is_whole else gguf.LlamaFileType.MOSTLY_Q8_0)
    add_tokenizer(writer, tokenizer)
    random = np.random.default_rng(0)
    for tensor in peer.tensors():
        numbers = random.standard_normal(tensor.shape, np.float32) * SPREAD + tensor.middle
        kind = gguf.GGMLQuantizationType[matrices if tensor.kind == MATRIX else tensor.kind]
        data = numbers.astype(np.float32) if kind.name == FLOATS else gguf.quants.quantize(numbers, kind)
        writer.add_tensor(tensor.name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def whole_file(directory: Path, name: str) -> Path:
    """Where a peer lies in fp32, for the quantiser."""
    return directory / f"{name}-f32.gguf"


def add_tokenizer(writer: Any, file: Path) -> None:
    """The byte-level BPE of `file`, in GPT-2's form; its first token ends a text."""
    model = json.loads(file.read_text("utf-8"))["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    if len(tokens) != VOCAB_SIZE:
        raise ValueError(f"{file} must have {VOCAB_SIZE} tokens, got {len(tokens)}")
    normal, control = 1, 3  # llama.cpp's kinds of tokens
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([control] + [normal] * (len(tokens) - 1))
    writer.add_token_merges([" ".join(pair) for pair in model["merges"]])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    writer.add_add_bos_token(False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    directory = parser.parse_args().directory
    directory.mkdir(parents=True, exist_ok=True)
    for name, peer in PEERS.items():
        file = directory / f"{name}.gguf"
        write_model(peer, file)
        print(f"{file}: {peer.num_weights / 1e6:.1f}M weights a token, {file.stat().st_size / 1e6:.1f} MB")
    for name in {name for name, _ in QUANTISED.values()}:
        write_model(PEERS[name], whole_file(directory, name), matrices=FLOATS)


if __name__ == "__main__":
    main()
