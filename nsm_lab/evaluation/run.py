"""`nsm eval`: from a model directory and a corpus to a report."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import torch

from nsm_core.architectures import architecture_of
from nsm_core.config import ModelConfig
from nsm_core.errors import ConfigError
from nsm_core.execution.choose import choose_executor
from nsm_core.execution.devices import resolve_device
from nsm_core.loaded_model import LoadedModel
from nsm_core.model.bundled import find_checkpoint
from nsm_core.model.loader import LoadedNsm
from nsm_lab.baselines.register import register_baselines
from nsm_lab.evaluation.config import HISTORY_LISTS, EvalConfig, Part
from nsm_lab.evaluation.devices import resolve_precision
from nsm_lab.evaluation.executed import ExecutedModel
from nsm_lab.evaluation.history.key_tasks import make_key_tasks
from nsm_lab.evaluation.history.measure import HistoryResult, HistorySettings, measure_history
from nsm_lab.evaluation.history.reach import attention_reach
from nsm_lab.evaluation.losses import PositionLosses
from nsm_lab.evaluation.model_facts import model_facts
from nsm_lab.evaluation.passkey import PasskeyResult, measure_passkey
from nsm_lab.evaluation.perplexity import EncodedDocument, encode_documents, evaluate
from nsm_lab.evaluation.reading import EvaluatedModel
from nsm_lab.evaluation.report import Report
from nsm_lab.evaluation.samples import Sample, write_samples
from nsm_lab.evaluation.slots import SlotUsage, measure_slot_usage
from nsm_lab.evaluation.splits import SplitResult, measure_splits
from nsm_lab.evaluation.stored_state_quality import StoredStateResult, measure_stored_states
from nsm_lab.provenance import Provenance, command_line, source_commit, utc_now, versions
from nsm_lab.training.data_files import read_documents

Result = TypeVar("Result")

_SLOT_DOCUMENTS = 4
_SLOT_TOKENS = 2048


def run_evaluation(config: EvalConfig, *, log: Callable[[str], None] = lambda line: None) -> Report:
    """Runs `config`, with progress bars on a terminal. Raises ConfigError or CheckpointError.

    `log` gets a line at the start and one after each part. A run may take hours.
    """
    register_baselines()
    device = resolve_device(config.device)
    path = find_checkpoint(config.model)
    loaded: LoadedModel[Any] = architecture_of(path).load(path, device)
    documents = itertools.islice(read_documents(config.data, config.split), config.max_documents)
    encoded = encode_documents(loaded.tokenizer, documents)
    model, numerics = _evaluated(config, loaded)
    subject = _Subject(config, loaded, model, device, encoded, log)
    log(f"{loaded.name} on {config.split}, {subject.size()}, on {device}: {', '.join(config.suite)}")
    report = Report(
        provenance=_provenance(loaded, device, numerics),
        settings=_settings(config, subject.precision),
        model=model_facts(loaded.model.config, loaded.model.state_spec),
        losses=subject.measured("loss", subject.losses),
        history=subject.measured("history", subject.history),
        passkey=subject.measured("passkey", subject.passkey),
        stored_states=subject.measured("stored_states", subject.stored_states),
        splits=subject.measured("split", subject.splits),
        slots=subject.measured("slots", subject.slots),
        samples=subject.measured("samples", subject.samples) or (),
    )
    if config.output is not None:
        report.save(config.output)
    return report


def _evaluated(config: EvalConfig, loaded: LoadedModel[Any]) -> tuple[EvaluatedModel, str]:
    """The model on its executor, and its numerics class. An eager NSM model is read as it is."""
    if config.executor == "eager" and isinstance(loaded, LoadedNsm):
        return loaded.model, loaded.numerics
    chosen = choose_executor(loaded, config.executor)
    executor = chosen.factory(chosen.model, num_rows=config.batch_documents, poison=False)
    return ExecutedModel(executor, loaded.model.state_spec), chosen.numerics


class _Subject:
    """A loaded model and the encoded documents, which every part of the suite measures."""

    def __init__(
        self,
        config: EvalConfig,
        loaded: LoadedModel[Any],
        model: EvaluatedModel,
        device: str,
        documents: list[EncodedDocument],
        log: Callable[[str], None],
    ) -> None:
        if not documents:
            raise ConfigError("there are no documents to evaluate on")
        self._log = log
        self._config, self._model, self._tokenizer = config, model, loaded.tokenizer
        self._sizes = loaded.model.config
        self._documents = documents
        is_executed = isinstance(model, ExecutedModel)  # which has a precision of its own
        self.precision = "fp32" if is_executed else resolve_precision(config.precision, device)

    @property
    def _autocast(self) -> bool:
        return self.precision == "bf16"

    def size(self) -> str:
        documents = self._cut_documents()
        return f"{len(documents):,} documents of {sum(map(len, documents)):,} tokens"

    def measured(self, part: Part, measure: Callable[[], Result]) -> Result | None:
        """Runs `measure`, or returns None for a part outside of the suite."""
        if part not in self._config.suite:
            return None
        started = time.monotonic()
        result = measure()
        self._log(f"{part}: {time.monotonic() - started:.1f} s")
        return result

    def _cut_documents(self) -> list[EncodedDocument]:
        return [document.cut(self._config.max_tokens_per_document) for document in self._documents]

    def losses(self) -> PositionLosses:
        config = self._config
        return evaluate(
            self._model,
            self._cut_documents(),
            segment_len=config.segment_len,
            batch_documents=config.batch_documents,
            buckets=config.buckets,
            autocast=self._autocast,
        )

    def history(self) -> HistoryResult:
        config, texts = self._config, [document.tokens[:-1] for document in self._documents]
        return measure_history(
            self._model,
            texts,
            make_key_tasks(self._tokenizer.encode, config.history_prompts * len(texts), seed=config.seed),
            reach=attention_reach(self._sizes) if isinstance(self._sizes, ModelConfig) else 0,
            settings=HistorySettings(
                starts=config.history_starts,
                spans=config.history_spans,
                repeat_distances=config.history_repeats,
                passages=config.history_passages,
                key_contexts=config.history_contexts,
                key_distances=config.history_distances,
                prompts=config.history_prompts,
                max_rows=config.batch_documents,
            ),
            autocast=self._autocast,
            log=self._log,
        )

    def passkey(self) -> PasskeyResult:
        config = self._config
        return measure_passkey(
            self._model,
            self._tokenizer,
            np.concatenate([document.tokens[1:-1] for document in self._documents]),
            lengths=config.passkey_lengths,
            depths=config.passkey_depths,
            num_examples=config.passkey_examples,
            seed=config.seed,
            autocast=self._autocast,
        )

    def stored_states(self) -> StoredStateResult:
        config = self._config
        return measure_stored_states(
            self._model,
            self._documents,
            prefix_len=config.stored_state_prefix,
            max_saves=config.stored_state_count,
            seed=config.seed,
        )

    def splits(self) -> SplitResult:
        longest = max(self._documents, key=len)
        return measure_splits(self._model, torch.from_numpy(longest.tokens[: self._config.split_tokens]))

    def slots(self) -> SlotUsage | None:
        texts = (torch.from_numpy(document.cut(_SLOT_TOKENS).tokens[:-1]) for document in self._documents)
        usage = measure_slot_usage(self._model, itertools.islice(texts, _SLOT_DOCUMENTS))
        if usage is None:
            self._log("slots: left out, the model has no routers; nsm inspect shows keyed slots")
        return usage

    def samples(self) -> tuple[Sample, ...]:
        config = self._config
        return tuple(
            write_samples(
                self._model, self._tokenizer, config.prompts, max_tokens=config.sample_tokens, seed=config.seed
            )
        )


def _provenance(loaded: LoadedModel[Any], device: str, numerics: str) -> Provenance:
    return Provenance(
        model=loaded.name,
        fingerprint=loaded.fingerprint,
        num_parameters=loaded.num_parameters,
        weight_format=loaded.weight_format,
        numerics=numerics,
        device=torch.cuda.get_device_name(device) if device.startswith("cuda") else device,
        command=command_line(),
        commit=source_commit(),
        versions=versions(),
        created=utc_now(),
    )


def _settings(config: EvalConfig, precision: str) -> dict[str, object]:
    """The settings that the figures depend on."""
    names = ["split", "max_documents", "max_tokens_per_document", "segment_len", "batch_documents"]
    if "history" in config.suite:
        names += [*HISTORY_LISTS, "history_passages", "history_prompts", "seed"]
    if "passkey" in config.suite:
        names += ["passkey_lengths", "passkey_depths", "passkey_examples", "seed"]
    if "stored_states" in config.suite:
        names += ["stored_state_prefix", "stored_state_count"]
    return {"precision": precision, "executor": config.executor, **{name: getattr(config, name) for name in names}}
