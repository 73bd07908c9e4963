"""The canonical names and shapes of an RWKV-7 model's tensors: those of the official `.pth` files. No torch here.

Readers of other layouts rename and turn their tensors into these; the model and its executors know no other names.
"""

from __future__ import annotations

from collections.abc import Iterator

from nsm_core.rwkv7.config import Rwkv7Config

Shape = tuple[int, ...]


def tensor_shapes(config: Rwkv7Config) -> dict[str, Shape]:
    """Every tensor that the model reads, in the order of the official files.

    The first block's `v0`, `v1` and `v2` are in some files; no model reads them, and they are not here.
    """
    return dict(_all_shapes(config))


def num_parameters(config: Rwkv7Config) -> int:
    """Numbers in all tensors together."""
    total = 0
    for shape in tensor_shapes(config).values():
        count = 1
        for size in shape:
            count *= size
        total += count
    return total


def _all_shapes(config: Rwkv7Config) -> Iterator[tuple[str, Shape]]:
    width, vector = config.width, (config.width,)
    yield "emb.weight", (config.vocab_size, width)
    for layer in range(config.num_layers):
        prefix = f"blocks.{layer}."
        for norm in ("ln0", "ln1", "ln2") if layer == 0 else ("ln1", "ln2"):
            yield f"{prefix}{norm}.weight", vector
            yield f"{prefix}{norm}.bias", vector
        for name, shape in _time_mix_shapes(config, layer):
            yield f"{prefix}att.{name}", shape
        yield f"{prefix}ffn.x_k", (1, 1, width)
        yield f"{prefix}ffn.key.weight", (config.hidden, width)
        yield f"{prefix}ffn.value.weight", (width, config.hidden)
    yield "ln_out.weight", vector
    yield "ln_out.bias", vector
    yield "head.weight", (config.vocab_size, width)


def _time_mix_shapes(config: Rwkv7Config, layer: int) -> Iterator[tuple[str, Shape]]:
    width = config.width
    row: Shape = (1, 1, width)
    for letter in "rwkvag":
        yield f"x_{letter}", row
    ranks = {"w": config.decay_rank, "a": config.rate_rank, "v": config.value_rank}
    for letter, rank in ranks.items():
        if letter == "v" and layer == 0:
            continue
        yield f"{letter}0", row
        yield f"{letter}1", (width, rank)
        yield f"{letter}2", (rank, width)
    yield "g1", (width, config.gate_rank)
    yield "g2", (config.gate_rank, width)
    yield "k_k", row
    yield "k_a", row
    yield "r_k", (config.num_heads, config.head_size)
    for name in ("receptance", "key", "value", "output"):
        yield f"{name}.weight", (width, width)
    yield "ln_x.weight", (width,)
    yield "ln_x.bias", (width,)
