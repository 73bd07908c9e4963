"""Compiles the decode kernels for a Hopper GPU on any machine: `python -m benchmarks.decode_builds`.

One line a kernel: seconds to compile, shared memory, registers and bytes of stack a thread (what did not fit into
registers), at the sizes of pulse-books and of RWKV-7 0.1B. Exits with 1 if a kernel does not compile or may race: what
the matrix units read out of shared memory needs a buffer for every step in flight, and the compiler (3.6) makes one
less where the same tile is also read in another way.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from benchmarks.kernel_builds import registers
from nsm_core.execution.cuda.kernels import (
    attention,
    linear,
    overlap,
    prompt_attention,
    prompt_keyed,
    prompt_rows,
    rows,
    slots,
)
from nsm_core.execution.rwkv7.cuda.kernels import heads, products, tokens

TARGET = GPUTarget("cuda", 90, 32)
FLOATS = {"eps", "taper", "floor", "largest", "factor", "turn", "most", "shortest"}
UNALIGNED = {"num_rows", "width", "num_pieces", "batch", "no_row", "num_tokens"}
TYPES = {"rows_ptr": "*i64", "ids_ptr": "*i64", "start_ptr": "*i64", "position_ptr": "*i64", "turns_ptr": "*fp64"}
TYPES |= {"positions_ptr": "*i64", "lengths_ptr": "*i64"}
TYPES |= {"offsets_ptr": "*i64", "starts_ptr": "*i64", "counts_ptr": "*i64", "table_ptr": "*i64"}
BF16, FP32 = "*bf16", "*fp32"
SLOTS = {"H": 8, "M": 64, "K": 64, "TAPS": 4, "SLOTS": 64, "CHANNELS": 64, "LINES": 2}
RING = {"H": 8, "GROUP": 4, "HALF": 32}
PROMPT = {"H": 8, "GROUP": 4, "K": 64, "CHANNELS": 64, "WINDOW": 128, "QUERIES": prompt_attention.QUERIES}
PROMPT |= {"KEYS": prompt_attention.KEYS, "PRECISION": "ieee"}
WINDOW = {"WINDOW": 128, "KV": 2, "TOKENS": prompt_attention.TOKENS}
CONTEXT = {"P": 3072, "H": 8, "V": 128, "TOKENS": prompt_keyed.TOKENS}
READ = RING | {"CHANNELS": 64, "QUERIES": attention.QUERIES, "POSITIONS": attention.POSITIONS, "PRECISION": "ieee"}


def source(kernel: Any, types: dict[str, str | None], constants: dict[str, Any]) -> ASTSource:
    """`types` of pointers, None for one that is not given; other pointers are those of TYPES, or to fp32."""
    signature, values, attributes = {}, {}, {}
    for index, name in enumerate(kernel.arg_names):
        is_pointer = name.endswith("_ptr")
        if name in constants or (is_pointer and types.get(name, "") is None):
            signature[name], values[(index,)] = "constexpr", constants.get(name)
            continue
        number = "fp32" if name in FLOATS else "i32"
        signature[name] = types.get(name) or TYPES.get(name, FP32) if is_pointer else number
        if is_pointer or (number == "i32" and name not in UNALIGNED):
            attributes[(index,)] = [["tt.divisibility", 16]]
    return ASTSource(kernel, signature, constexprs=values, attrs=attributes)


def may_race(ttgir: str) -> bool:
    """Whether a tile in shared memory is read by threads and by the matrix units: then it lacks a buffer."""
    by_units = set(re.findall(r"warp_group_dot (%\w+),", ttgir)) | set(
        re.findall(r"warp_group_dot %\w+, (%\w+)", ttgir)
    )
    return not by_units.isdisjoint(re.findall(r"local_load (%\w+)", ttgir))


def build(label: str, kernel: Any, types: dict[str, str | None], constants: dict[str, Any], **options: int) -> bool:
    started = time.monotonic()
    options |= {"launch_pdl": True}
    try:
        compiled = triton.compile(source(kernel, types, constants | {"CHAINED": True}), target=TARGET, options=options)
    except Exception as error:  # the compiler raises errors of many kinds: all mean that the kernel does not build
        print(f"{label:16s}  FAILED {type(error).__name__}: {error}", flush=True)
        return False
    is_racing = may_race(compiled.asm["ttgir"])
    usage, shared = registers(compiled.asm["cubin"]), compiled.metadata.shared / 1024
    verdict = "  MAY RACE" if is_racing else ""
    print(f"{label:16s} {time.monotonic() - started:5.1f} s {shared:4.0f} KiB shared {usage}{verdict}", flush=True)
    return not is_racing


def build_linear(form: str, columns: int) -> bool:
    """A form of the linear layer with bf16 weights, or the router's in fp32."""
    is_router, is_stream = form == "router", form == "out"
    is_normed = form in ("project", "up", "router")
    types = {"x_ptr": FP32 if is_router else BF16, "weight_ptr": FP32 if is_router else BF16}
    types |= {"rest_ptr": FP32 if is_router else None, "squares_ptr": FP32 if is_normed else None}
    types |= {"bias_ptr": FP32 if is_router else None, "residual_ptr": FP32 if is_stream else None}
    types |= {"out_ptr": BF16 if form in ("project", "up") else FP32, "low_ptr": BF16 if is_stream else None}
    types |= {"high_ptr": FP32 if is_stream else None, "rest_out_ptr": FP32 if is_stream else None}
    types |= {"squares_out_ptr": FP32 if is_stream else None}
    constants = {
        "NORM": is_normed,
        "GATED": form == "up",
        "SECOND": form == "up" or is_router,
        "COLS": columns,
        "DEPTH": linear.DEPTH,
    }
    constants |= {"ROWS": linear.ROWS, "PRECISION": "tf32" if is_router else "ieee", "PARTS": 32}
    constants |= {"BESIDE": is_router, "LINES": 16 if is_router else 8, "PER_LINE": 32 if is_router else 64}
    constants |= {"IS_PADDED": True}
    stages = linear.FP32_STAGES if is_router else linear.STAGES[columns]
    return build(f"{form} {columns}", linear._linear, types, constants, num_warps=4, num_stages=stages)


def build_others() -> list[bool]:
    sigmoid = {"projected_ptr": BF16, "out_ptr": BF16, "bias_ptr": None, "timescale_ptr": None}
    softmax = {"projected_ptr": BF16, "out_ptr": BF16}
    ring = {"projected_ptr": BF16, "ring_ptr": "*fp16", "out_ptr": BF16}
    warps = {"num_warps": slots.NUM_WARPS}
    ids = {"given_ptr": "*i64", "sampled_ptr": "*i64", "pauses_ptr": "*u8"}
    return [
        build("resolve", overlap._resolve, ids, {}, num_warps=1),
        build("begin", rows._begin, {"low_ptr": BF16}, {"D": 512, "WIDTH": 512, "HALF": 32, "ANGLES": 32}, num_warps=1),
        build("final norm", rows._final_norm, {}, {"D": 512, "WIDTH": 512}, num_warps=1),
        build("slots, sigmoid", slots._slot_step, sigmoid, SLOTS | {"TOP_K": 0}, **warps),
        build("slots, softmax", slots._slot_step, softmax, SLOTS | {"TOP_K": 8}, **warps),
        build("ring", attention._read_ring, ring, READ, num_warps=attention.NUM_WARPS),
        build("join", attention._join, ring, RING | {"PAIRS": 32, "PIECES": 16}, num_warps=1),
    ]


def build_prompts() -> list[bool]:
    low = dict.fromkeys(("projected_ptr", "q_ptr", "k_ptr", "v_ptr", "kv_ptr", "out_ptr", "read_ptr"), BF16)
    low |= {"value_ptr": BF16, "change_ptr": BF16, "low_ptr": BF16, "up_ptr": BF16}
    norm = {"D": 512, "WIDTH": 512, "ROWS": prompt_rows.ROWS}
    gate = {"HIDDEN": 1344, "ROWS": prompt_rows.GATE_ROWS, "COLUMNS": prompt_rows.GATE_COLUMNS}
    rates = {"H": 8, "HEADS": 8, "TOKENS": prompt_keyed.RATE_TOKENS}
    window = WINDOW | {"P": 768, "H": 8, "HALF": 32, "LANES": 32}
    context = CONTEXT | {"M": 128, "TAPS": 4, "TAIL": 4}
    return [
        build("prompt norm", prompt_rows._add_norm, low | {"change_ptr": None, "sum_ptr": None}, norm, num_warps=4),
        build("prompt sum, norm", prompt_rows._add_norm, low | {"full_ptr": None}, norm, num_warps=4),
        build("prompt gate", prompt_rows._gate, low, gate, num_warps=4),
        build("prompt rates", prompt_keyed._rates, {}, rates, num_warps=4),
        build("prompt context", prompt_keyed._context, low, context, num_warps=4),
        build("prompt output", prompt_keyed._output, low, CONTEXT | {"C": 2048}, num_warps=4),
        build("prompt window", prompt_attention._read_window, low, window, num_warps=4),
        build("prompt attention", prompt_attention._attend, low, PROMPT, num_warps=4, num_stages=2),
        build("prompt ring", prompt_attention._keep_ring, low, WINDOW | {"K": 64, "CHANNELS": 64}, num_warps=4),
    ]


def build_rwkv7() -> list[bool]:
    bf16, row = {"x_ptr": BF16, "weight_ptr": BF16}, {"D": 768, "WIDTH": 1024}
    tile = {"FIELDS": products.IS_INNER + 1, "UNIT": products.UNIT, "ROWS": products.ROWS, "DEPTH": products.DEPTH}
    tile |= {"IS_PADDED": True, "PRECISION": "ieee", "LINES": 16, "PER_LINE": 64}
    variants = {
        "rwkv7 project": (bf16 | {"bias_ptr": None, "inner_ptr": BF16}, {"ADDED": False}),
        "rwkv7 outer": (bf16 | {"inner_ptr": None}, {"ADDED": False}),
        "rwkv7 added": (bf16 | {"bias_ptr": None, "inner_ptr": None}, {"ADDED": True}),
        "rwkv7 squares": (bf16 | {"bias_ptr": None, "out_ptr": None, "inner_ptr": BF16}, {"ADDED": False}),
    }
    built = [
        build(f"{name} {columns}", products._products, types, tile | own | {"COLS": columns}, num_warps=4, num_stages=n)
        for name, (types, own) in variants.items()
        for columns, n in products.STAGES.items()
    ]
    head = {"H": 12, "K": 64}
    before = head | {"RECEIVED_AT": 0, "KEY_AT": 768, "VALUE_AT": 1536, "DECAY_AT": 0, "RATE_AT": 768}
    before |= {"RESIDUAL_AT": 1536, "TOKENS": heads.TOKENS}
    moving = head | {"COLUMNS": heads.COLUMNS, "AHEAD": heads.AHEAD}
    return [
        *built,
        build("rwkv7 prepare", heads._prepare, {}, before, num_warps=1),
        build("rwkv7 scan", heads._scan, {}, moving, num_warps=1),
        build("rwkv7 answer", heads._answer, {"out_ptr": BF16}, head | {"TOKENS": heads.TOKENS}, num_warps=1),
        build("rwkv7 begin", tokens._begin, {"embedding_ptr": BF16}, row, num_warps=4),
        build("rwkv7 mix", tokens._mix, {"out_ptr": BF16}, row | {"N": 6}, num_warps=4),
        build("rwkv7 first mix", tokens._mix, {"out_ptr": BF16, "retained_ptr": None}, row | {"N": 6}, num_warps=4),
        build("rwkv7 end", tokens._end, {"out_ptr": BF16}, row, num_warps=4),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    others = {"prompts": build_prompts, "rwkv7": build_rwkv7}
    choices = ["project", "out", "up", "logits", "router", *others]
    parser.add_argument("--form", choices=choices, help="only this linear layer, or these kernels")
    form = parser.parse_args().form
    if form in others:
        sys.exit(0 if all(others[form]()) else 1)
    names = ("project", "out", "up", "logits") if form is None else (form,)
    built = [build_linear(name, columns) for name in names if name != "router" for columns in linear.STAGES]
    if form in (None, "router"):
        built += [build_linear("router", columns) for columns in (linear.SPLIT_COLUMNS, linear.FP32_COLUMNS)]
    sys.exit(0 if all(built) and (form is not None or all([*build_others(), *build_prompts(), *build_rwkv7()])) else 1)


if __name__ == "__main__":
    main()
