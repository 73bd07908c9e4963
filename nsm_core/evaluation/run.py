"""`nsm eval`: from a model directory and a corpus to a report."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path

import torch

from nsm_core.errors import ConfigError
from nsm_core.evaluation.losses import DEFAULT_BUCKETS
from nsm_core.evaluation.perplexity import encode_document, evaluate
from nsm_core.evaluation.report import Provenance, Report, command_line, source_commit, utc_now, versions
from nsm_core.evaluation.samples import write_samples
from nsm_core.evaluation.slots import SlotUsage, measure_slot_usage
from nsm_core.model.loader import LoadedModel, load_checkpoint
from nsm_core.training.data_files import SPLITS, Document, Split, read_documents

_SLOT_DOCUMENTS = 4
_SLOT_TOKENS = 2048


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EvalConfig:
    """One evaluation. The defaults read every document of the validation split to its end."""

    data: Path
    model: Path | None = None  # None: the bundled model
    split: Split = "val"
    max_documents: int | None = None
    max_tokens_per_document: int | None = None
    segment_len: int = 512  # tokens a forward call: speed and memory only
    batch_documents: int = 8
    buckets: tuple[int, ...] = DEFAULT_BUCKETS
    device: str = "auto"
    precision: str = "auto"  # bf16 autocast on a GPU, fp32 on a CPU
    prompts: tuple[str, ...] = ()  # a greedy and a drawn continuation of each
    sample_tokens: int = 100
    seed: int = 0
    output: Path | None = None  # writes <output>.json and <output>.md

    def __post_init__(self) -> None:
        for name in ("max_documents", "max_tokens_per_document", "segment_len", "batch_documents", "sample_tokens"):
            value = getattr(self, name)
            self._require(value is None or value >= 1, name, "at least 1")
        self._require(self.split in SPLITS, "split", ", ".join(SPLITS[:-1]) + f" or {SPLITS[-1]}")
        self._require(self.precision in ("auto", "bf16", "fp32"), "precision", "auto, bf16 or fp32")

    def _require(self, condition: bool, name: str, wish: str) -> None:
        if not condition:
            raise ConfigError(f"{name} must be {wish}, got {getattr(self, name)!r}")


def run_evaluation(config: EvalConfig) -> Report:
    """Runs `config`, with progress bars on a terminal. Raises ConfigError or CheckpointError."""
    device = _resolve_device(config.device)
    precision = ("bf16" if device.startswith("cuda") else "fp32") if config.precision == "auto" else config.precision
    loaded = load_checkpoint(config.model, device)
    documents = list(itertools.islice(read_documents(config.data, config.split), config.max_documents))
    losses = evaluate(
        loaded.model,
        loaded.tokenizer,
        documents,
        max_tokens_per_document=config.max_tokens_per_document,
        segment_len=config.segment_len,
        batch_documents=config.batch_documents,
        buckets=config.buckets,
        autocast=precision == "bf16",
    )
    report = Report(
        provenance=_provenance(loaded, device),
        settings=_settings(config, precision),
        losses=losses,
        slots=_slot_usage(loaded, documents),
        samples=tuple(
            write_samples(
                loaded.model, loaded.tokenizer, config.prompts, max_tokens=config.sample_tokens, seed=config.seed
            )
        ),
    )
    if config.output is not None:
        report.save(config.output)
    return report


def _resolve_device(wish: str) -> str:
    if wish == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, device=wish)
    except (RuntimeError, AssertionError) as error:  # torch built without CUDA asserts
        raise ConfigError(f"device {wish!r} cannot be used: {str(error).splitlines()[0]}") from error
    return wish


def _slot_usage(loaded: LoadedModel, documents: list[Document]) -> SlotUsage:
    device = next(loaded.model.parameters()).device
    encoded = (encode_document(loaded.tokenizer, document.text, _SLOT_TOKENS) for document in documents)
    texts = (torch.from_numpy(document.tokens[:-1]).to(device) for document in encoded)
    return measure_slot_usage(loaded.model, itertools.islice(texts, _SLOT_DOCUMENTS))


def _provenance(loaded: LoadedModel, device: str) -> Provenance:
    return Provenance(
        model=loaded.name,
        fingerprint=loaded.fingerprint,
        num_parameters=loaded.num_parameters,
        weight_format=loaded.weight_format,
        numerics=loaded.numerics,
        device=torch.cuda.get_device_name(device) if device.startswith("cuda") else device,
        command=command_line(),
        commit=source_commit(),
        versions=versions(),
        created=utc_now(),
    )


def _settings(config: EvalConfig, precision: str) -> dict[str, object]:
    """What the numbers depend on."""
    return {
        "split": config.split,
        "max_documents": config.max_documents,
        "max_tokens_per_document": config.max_tokens_per_document,
        "precision": precision,
        "segment_len": config.segment_len,
        "batch_documents": config.batch_documents,
    }
