"""Short trainings of layers beside each other, and what their states then hold:
`python -m benchmarks.quality.controls --data books --tokenizer tokenizer.json --out runs --output RESULT`.

Keyed slots beside the layers of the literature, and with one thing changed (`trial_layers.py`), from new weights.
An arm is one `nsm train` command, printed before it starts, with equal text and tokens for all; then the model is
measured. RESULT.jsonl gets a line for each arm, RESULT.md the table. A second call runs the arms that are missing, or
with another seed (`--extra "--seed 1"`). The Transformer can be measured within 17,408 tokens: `--key-contexts 8192
--key-distances 256 7168` with it.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import math
import re
import shlex
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.quality.loops import LOOP_SHARE, repeated_share
from benchmarks.quality.trial_layers import register_trial_layers
from nsm_core.model.loader import LoadedNsm, load_checkpoint
from nsm_core.model.nsm import NsmModel
from nsm_core.model.storage import WEIGHTS_FILE
from nsm_lab.baselines.register import register_baselines
from nsm_lab.evaluation.history.estimates import Estimate
from nsm_lab.evaluation.history.key_tasks import make_key_tasks
from nsm_lab.evaluation.history.measure import HistorySettings, measure_history
from nsm_lab.evaluation.history.reach import attention_reach
from nsm_lab.evaluation.markdown import table
from nsm_lab.evaluation.perplexity import encode_document, evaluate
from nsm_lab.evaluation.reading import reading
from nsm_lab.evaluation.runs_file import RunsFile
from nsm_lab.provenance import origin
from nsm_lab.training.__main__ import parse
from nsm_lab.training.config import TrainConfig
from nsm_lab.training.data_files import read_documents
from nsm_lab.training.log import LOG_FILE
from nsm_lab.training.loop import train

COMMON = (
    "--preset keyed-hybrid --rows 32 --seq-len 4096 --carry 1 --recall 0.15 "
    "--muon-lr 0.015 --adam-lr 6e-3 --weight-decay 0.1 --warmup 0.02 --decay 0.5"
)
ARMS = {
    "keyed slots": "",
    # two heads of 256 x 256 numbers are as many as eight of 128 x 128; the feed-forward parts make up for weights
    "RWKV-7": "--layer-pattern rrrW --num-heads 2 --num-kv-heads 1 --mlp-hidden 1776",
    # heads as published: a quarter of the numbers
    "RWKV-7, heads of 64": "--layer-pattern rrrW --mlp-hidden 1776",
    # rows as long as the text before and in the span whose history is measured; RoPE learns no farther positions
    "attention to everything": "--layer-pattern A --max-context 17408 --mlp-hidden 2048 --rows 7 --seq-len 17408 "
    "--carry 0 --whole-rows",
    # what one idea changes, for short trainings beside plain keyed slots (`--common` with half of the rows)
    "keyed slots that do not decay": "--layer-pattern uuuW",
    "keyed slots, decays from 10 to 1,000 tokens": "--layer-pattern tttW",
    "keyed slots, routes of one token": "--layer-pattern oooW",
    "Gated DeltaNet": "--layer-pattern gggW --mlp-hidden 1088",
    "Gated DeltaNet without convolutions": "--layer-pattern qqqW --mlp-hidden 1088",
    "Mamba-2": "--layer-pattern mmmW --mlp-hidden 1536",
    "windows of 434 tokens": "--layer-pattern W --window 434 --mlp-hidden 2048",
    # not compiled: their exchanges and gates are loops, which take minutes to compile
    "slot memory": "--layer-pattern NNNW --mlp-hidden 1416 --no-compile",
    "slot memory, a third communicates": "--layer-pattern NNCW --mlp-hidden 1410 --no-compile",
    "slot memory, a third with GRU gates by chunks of 64": "--layer-pattern NNGW --gate-chunk 64 --mlp-hidden 1388 "
    "--no-compile",
}
PROMPT_TOKENS, TEMPERATURE, PASSAGES_OF_A_TEXT = 64, 0.8, 4


def config_of(arm: str, options: argparse.Namespace) -> TrainConfig:
    """The training of an arm; its steps are as many as `--tokens` asks for."""
    flags = shlex.split(f"{options.common or COMMON} {ARMS[arm]} {options.extra}")
    named = re.sub(r"[^A-Za-z0-9.]+", "-", f"{arm} {options.tokens} {options.extra}")
    out = options.out / named.strip("-")
    flags += ["--data", str(options.data), "--tokenizer", str(options.tokenizer), "--out", str(out)]
    flags += ["--cache", str(options.out / "cache"), "--weight-format", "bf16", "--eval-every", "1000000"]
    sizes = parse(flags)
    steps = max(1, options.tokens // (sizes.rows * sizes.seq_len))
    flags += ["--steps", str(steps), "--save-every", str(steps)]
    print(f"{arm}: nsm train {shlex.join(flags)}", flush=True)
    return parse(flags)


def run_arm(arm: str, options: argparse.Namespace) -> dict[str, Any]:
    """What RESULT.jsonl keeps of an arm."""
    started, config = time.monotonic(), config_of(arm, options)
    if not (config.out / WEIGHTS_FILE).exists():  # else a call was stopped between training and measuring
        torch.compiler.reset()  # code compiled for a model that is gone
        train(config)
    trained_s = time.monotonic() - started
    loaded = load_checkpoint(config.out, options.device)
    measured = measure(loaded, options)
    seconds = time.monotonic() - started
    size = {"num_parameters": loaded.num_parameters, "state_bytes": loaded.model.state_spec.num_bytes}
    tokens = config.steps * config.rows * config.seq_len
    validation = {"val_loss": last_validation(config.out)}
    return {"tokens": tokens, "train_s": trained_s, "seconds": seconds, **size, **validation, **measured}


def last_validation(run: Path) -> float:
    """Nats a token on validation rows, at the end of the training."""
    with (run / LOG_FILE).open(newline="", encoding="utf-8") as file:
        return float(list(csv.DictReader(file))[-1]["val_loss"])


def measure(loaded: LoadedNsm, options: argparse.Namespace) -> dict[str, Any]:
    """Bits per byte, gains of repeated passages and of history, keys by distance, repeated tokens of samples."""
    is_gpu = options.device.startswith("cuda")
    longest = max(*options.key_contexts, *options.passage_distances, *options.history_spans) + 1024
    books = list(read_documents(options.data, options.split))[: options.books]
    texts = [np.array(loaded.tokenizer.encode(book.text[: 8 * longest])[:longest]) for book in books]
    encoded = [
        encode_document(loaded.tokenizer, book.text[: 8 * options.loss_tokens], options.loss_tokens) for book in books
    ]
    loss = evaluate(loaded.model, encoded, segment_len=4096, batch_documents=32, autocast=is_gpu)
    history = measure_history(
        loaded.model,
        texts,
        make_key_tasks(loaded.tokenizer.encode, 40),
        reach=attention_reach(loaded.config),
        settings=HistorySettings(
            starts=tuple(options.history_starts),
            spans=tuple(options.history_spans),
            repeat_distances=tuple(options.passage_distances),
            passages=2,
            key_contexts=tuple(options.key_contexts),
            key_distances=tuple(options.key_distances),
            prompts=2,
        ),
        autocast=is_gpu,
    )
    repeated = sampled_repeats(loaded, [text[:longest] for text in texts], options)
    return {
        "bits_per_byte": loss.total.bits_per_byte,
        "history": dataclasses.asdict(history),
        "repeated": sum(repeated) / len(repeated),
        "loops": sum(share > LOOP_SHARE for share in repeated) / len(repeated),
    }


def sampled_repeats(
    loaded: LoadedNsm, texts: Sequence[np.ndarray[Any, Any]], options: argparse.Namespace
) -> list[float]:
    """Of continuations of PASSAGES_OF_A_TEXT passages of each text, the share of tokens that were there before."""
    starts = range(0, PASSAGES_OF_A_TEXT * 256, 256)
    prompts = np.stack([text[start : start + PROMPT_TOKENS] for text in texts for start in starts])
    with reading(loaded.model, autocast=options.device.startswith("cuda")) as device:
        chosen = _sample(loaded.model, torch.from_numpy(prompts).to(device), options.sample_tokens)
    return [repeated_share(row) for row in chosen.tolist()]


def _sample(model: NsmModel, prompts: torch.Tensor, count: int) -> torch.Tensor:
    """[B, count] tokens drawn at TEMPERATURE."""
    generator = torch.Generator(prompts.device).manual_seed(0)
    hidden, state = model.forward(prompts, model.initial_state(len(prompts)))
    last, chosen = hidden[:, -1], list[torch.Tensor]()
    for _ in range(count):
        probabilities = (model.logits(last) / TEMPERATURE).softmax(dim=-1)
        chosen.append(torch.multinomial(probabilities, 1, generator=generator)[:, 0])
        last, state = model.step(chosen[-1], state)
    return torch.stack(chosen, dim=1)


def markdown(results: Sequence[dict[str, Any]]) -> str:
    """A row an arm; a dash where one was not measured as another was."""
    rows = [_cells(result) for result in results]
    heads = list(dict.fromkeys(head for row in rows for head in row))
    return table(heads, [[row.get(head, "–") for head in heads] for row in rows])


def _cells(result: dict[str, Any]) -> dict[str, str]:
    run, history, keys = result["run"], result["history"], result["history"]["keys"]["cells"]
    passages, starts = history["repeats"]["distances"], (history["fresh_starts"] or {"starts": []})["starts"]
    return {
        "arm": f"{run['arm']} {run['extra']}".strip(),
        "tokens": f"{result['tokens'] / 1e6:.1f}M",
        "parameters": f"{result['num_parameters']:,}",
        "state, MiB": f"{result['state_bytes'] / 2**20:.2f}",
        "seconds": f"{result['train_s']:.0f} + {_measuring(result):.0f}",
        "bits per byte": f"{result['bits_per_byte']:.4f}",
        "validation, nats": f"{result['val_loss']:.3f}",
        "repeated tokens": f"{result['repeated']:.1%}",
        "loops": f"{result['loops']:.0%}",
        **{f"passage {row['distance']:,} back": _estimate(Estimate(**row["gain"])) for row in passages},
        **{f"history before {row['start']:,}": _estimate(Estimate(**row["gain"])) for row in starts},
        **{f"key in {cell['context']:,} at {cell['distance']:,}: likeliest / written": _shares(cell) for cell in keys},
    }


def _shares(cell: dict[str, Any]) -> str:
    return f"{cell['is_likeliest']['mean']:.0%} / {cell['is_written']['mean']:.0%}"


def _measuring(result: dict[str, Any]) -> float:
    return float(result["seconds"] - result["train_s"])


def _estimate(estimate: Estimate) -> str:
    if estimate.high is None:
        return f"{estimate.mean:.3f}"
    return f"{estimate.mean:.3f} ± {estimate.high - estimate.mean:.3f}"


def write_report(options: argparse.Namespace, runs: RunsFile) -> None:
    """RESULT.md from the arms so far."""
    how = {
        **origin(),
        "measured on": f"{options.books} books of the {options.split} split, bits per byte on the first "
        f"{options.loss_tokens:,} tokens of each; samples of {options.sample_tokens} tokens at {TEMPERATURE}",
    }
    arms = dict.fromkeys(result["run"]["arm"] for result in runs.results)
    commands = [f"- {arm}: `{ARMS[arm] or 'nothing more'}`" for arm in arms]
    lines = [f"- {name}: `{value}`" for name, value in how.items()]
    text = "\n".join(("# Controls: layers\n", markdown(runs.results), "", *commands, "", *lines, ""))
    options.output.with_suffix(".md").write_text(text, "utf-8")


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("data", "tokenizer", "out", "output"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=24_000_000, help="of training, each arm")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS), metavar="ARM")
    parser.add_argument("--common", help="flags of all arms, in place of COMMON")
    parser.add_argument("--extra", default="", help="further flags of all arms, as one string")
    parser.add_argument("--time-limit-s", type=float, default=math.inf, help="no arm begins that would end later")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--split", default="val")
    parser.add_argument("--books", type=int, default=20)
    parser.add_argument("--loss-tokens", type=int, default=8192)
    parser.add_argument("--passage-distances", type=int, nargs="+", default=[1024, 4096, 16384])
    parser.add_argument("--history-starts", type=int, nargs="*", default=[2048, 6144])
    parser.add_argument("--history-spans", type=int, nargs="*", default=[16384])
    parser.add_argument("--key-contexts", type=int, nargs="+", default=[8192, 32768])
    parser.add_argument("--key-distances", type=int, nargs="+", default=[256, 7168, 16384, 28672])
    parser.add_argument("--sample-tokens", type=int, default=256)
    return parser


def main() -> None:
    options = build_parser().parse_args()
    register_baselines()
    register_trial_layers()
    started, longest = time.monotonic(), 0.0
    runs = RunsFile(options.output.with_suffix(".jsonl"))
    for arm in options.arms:
        run = {"arm": arm, "tokens": options.tokens, "extra": options.extra}
        if runs.find(run) is not None or time.monotonic() - started + longest > options.time_limit_s:
            continue
        result = runs.add(run, run_arm(arm, options))
        longest = max(longest, result["seconds"])
        if options.device.startswith("cuda"):
            torch.cuda.empty_cache()
        write_report(options, runs)
    if runs.results:  # also where lines of another machine were added
        write_report(options, runs)


if __name__ == "__main__":
    main()
