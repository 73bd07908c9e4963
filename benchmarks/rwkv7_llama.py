"""RWKV-7's logits beside llama.cpp's, from one GGUF in F32: `python -m benchmarks.rwkv7_llama`. A line of JSON each.

Random weights and trained ones (`tests/assets/rwkv7-books`). Of a text of test books: the largest difference of a logit
over all tokens, from our kernels in fp32 and from the plain model. Then greedy tokens after the first 64, and how many
of them are the same. `benchmarks.peers.build_llama` builds llama.cpp, which is asked through `peers/llama_logits.cpp`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.peers.build_llama import DIRECTORY, ROOT, LlamaBuild
from benchmarks.peers.rwkv7_gguf import FAMILY
from nsm_core.execution.native.precision import Precision
from nsm_core.execution.rwkv7.executor import Rwkv7Executor
from nsm_core.execution.rwkv7.weights import Rwkv7Weights
from nsm_core.rwkv7.config import Rwkv7Config
from nsm_core.rwkv7.layouts import GGUF, SHIFTS
from nsm_core.rwkv7.loader import load_rwkv7
from nsm_core.rwkv7.model import Rwkv7Model
from nsm_core.rwkv7.opening import OpenModel
from nsm_lab.provenance import source_commit
from nsm_lab.training.data_files import read_documents

SOURCE = Path(__file__).parent / "peers/llama_logits.cpp"
LIBRARIES = ("src/libllama.a", "ggml/src/libggml.a", "ggml/src/libggml-cpu.a", "ggml/src/libggml-base.a")
TRAINED = ROOT / "tests/assets/rwkv7-books"
BOOKS = ROOT / "data/books-sample"
PROMPT_TOKENS = 64

WRITE_RANDOM = """
from pathlib import Path
from benchmarks.peers.models import FLOATS, PEERS, write_model
import sys
write_model(PEERS["rwkv7"], Path(sys.argv[1]), matrices=FLOATS)
"""


def compile_program(build: LlamaBuild) -> Path:
    """With the compiler that made llama.cpp's libraries. Raises CalledProcessError."""
    program = build.program("nsm-llama-logits")
    headers = [f"-I{build.source / directory}" for directory in ("include", "ggml/include")]
    libraries = [str(build.directory / "build" / name) for name in LIBRARIES]
    compiler = [os.environ.get("CXX", "c++"), "-O2", "-std=c++17", *headers, str(SOURCE), "-o", str(program)]
    subprocess.run([*compiler, *libraries, "-lpthread", "-ldl", "-lgomp", "-lm"], check=True)
    return program


def write_random(build: LlamaBuild, file: Path) -> None:
    subprocess.run([str(build.python), "-c", WRITE_RANDOM, str(file)], check=True, cwd=ROOT)


def header_of(config: Rwkv7Config) -> dict[str, int | float]:
    return {
        "embedding_length": config.width,
        "block_count": config.num_layers,
        "feed_forward_length": config.hidden,
        "attention.head_count": 0,
        "attention.layer_norm_epsilon": config.norm_eps,
        "wkv.head_size": config.head_size,
        "attention.decay_lora_rank": config.decay_rank,
        "attention.iclr_lora_rank": config.rate_rank,
        "attention.value_residual_mix_lora_rank": config.value_rank,
        "attention.gate_lora_rank": config.gate_rank,
    }


def gguf_tensors(model: OpenModel) -> dict[str, Tensor]:
    """By GGUF's names, in its shapes, fp32. llama.cpp wants a value residual of the first block too, and reads none."""
    config, found = model.tensors.config, {}
    for name, value in model.tensors.items():
        flat = value.float()
        if GGUF.fused_of(name) is None:
            found[GGUF.name_of(name)] = flat.T.contiguous() if GGUF.is_turned(name) else flat.squeeze()
    for layer in range(config.num_layers):
        shifts = [model.tensors[f"blocks.{layer}.att.x_{letter}"].float().flatten() for letter in SHIFTS]
        found[f"blk.{layer}.{GGUF.fused}"] = torch.stack(shifts)[:, None, None]
        for name in ("channel_mix_lerp_k", "time_mix_r_k"):
            key = f"blk.{layer}.{name}.weight"
            found[key] = found[key].flatten()[None, None] if name.startswith("channel") else found[key].flatten()
    for part, shape in (
        ("0", (config.width,)),
        ("1", (config.rate_rank, config.width)),
        ("2", (config.width, config.rate_rank)),
    ):
        found[f"blk.0.time_mix_v{part}.weight"] = torch.zeros(shape)
    return found


def write_trained(build: LlamaBuild, directory: Path, file: Path) -> None:
    model = OpenModel(TRAINED)
    tensors, keys = directory / "tensors.npz", directory / "keys.json"
    arrays: dict[str, Any] = {name: value.numpy() for name, value in gguf_tensors(model).items()}
    np.savez(tensors, **arrays)
    keys.write_text(json.dumps(header_of(model.tensors.config)))
    subprocess.run(
        [str(build.python), "-m", "benchmarks.peers.rwkv7_gguf", str(tensors), str(keys), str(file)],
        check=True,
        cwd=ROOT,
    )


def ask(program: Path, file: Path, ids: Sequence[int], *more: str) -> bytes:
    given = np.array(ids, np.int32).tobytes()
    return subprocess.run([str(program), str(file), *more], input=given, capture_output=True, check=True).stdout


class Ours:
    """The same file on our kernels in fp32, one row."""

    def __init__(self, model: Rwkv7Model) -> None:
        self._executor = Rwkv7Executor(model, num_rows=1, weights=Rwkv7Weights(model, Precision.FP32))
        self._executor.pool.lease(0)

    def read(self, ids: Sequence[int]) -> Tensor:
        """Logits of all tokens of a new text: [tokens, vocabulary]."""
        self._executor.pool.write(0, self._executor.initial)
        return self._executor.logits(self._executor.read((0,), (ids,))[0])

    def greedy(self, ids: Sequence[int], num_tokens: int) -> list[int]:
        found, logits = [], self.read(ids)[-1:]
        for _ in range(num_tokens):
            found.append(int(logits.argmax()))
            logits = self._executor.logits(self._executor.step((0,), found[-1:]))
        return found


def compare(program: Path, file: Path, ids: Sequence[int], num_greedy: int) -> Iterator[dict[str, Any]]:
    model = load_rwkv7(file).model
    theirs = torch.from_numpy(np.frombuffer(ask(program, file, ids), np.float32).reshape(len(ids), -1).copy())
    ours = Ours(model)
    logits = ours.read(ids)
    with torch.inference_mode():
        hidden, _ = model.forward(torch.tensor([list(ids)]), model.initial_state(1))
        plain = model.logits(hidden[0])
    for name, found in (("native-fp32", logits), ("eager", plain)):
        yield {
            "against": name,
            "tokens": len(ids),
            "largest_difference": float((found - theirs).abs().max()),
            "largest_logit": float(theirs.abs().max()),
            "same_likeliest": int((found.argmax(-1) == theirs.argmax(-1)).sum()),
        }
    prompt = ids[:PROMPT_TOKENS]
    expected = np.frombuffer(ask(program, file, prompt, str(num_greedy)), np.int32).tolist()
    mine = ours.greedy(prompt, num_greedy)
    same = next((i for i, (a, b) in enumerate(zip(mine, expected, strict=True)) if a != b), num_greedy)
    yield {"greedy_tokens": num_greedy, "same_until": same}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, default=DIRECTORY, help="where build_llama put llama.cpp")
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--greedy", type=int, default=512)
    args = parser.parse_args()
    torch.set_num_threads(1)
    build = LlamaBuild(args.directory)
    program = compile_program(build)
    print(json.dumps({"family": FAMILY, "commit": source_commit(), "torch": torch.__version__}), flush=True)
    text = next(iter(read_documents(BOOKS, "test"))).text[: 12 * args.tokens]
    ids = OpenModel(TRAINED).tokenizer().encode(text)[: args.tokens]
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch)
        random, trained = directory / "random.gguf", directory / "trained.gguf"
        write_random(build, random)
        write_trained(build, directory, trained)
        for name, file in (("random", random), ("trained", trained)):
            for row in compare(program, file, ids, args.greedy):
                print(json.dumps({"weights": name, **row}), flush=True)


if __name__ == "__main__":
    main()
