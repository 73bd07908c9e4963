"""What rounded weights cost pulse-books, on a part of a book that it was not trained on."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from benchmarks.measured_model import MEASURED_MODEL
from benchmarks.native_quality import NSM_EXECUTORS, REFERENCE, compare, make_executors, read
from nsm_core.execution.native.library import variants
from nsm_core.model.loader import load_checkpoint
from nsm_lab.evaluation.perplexity import encode_document
from nsm_lab.training.data_files import read_documents

BOOKS = Path(__file__).parents[2] / "data/books-sample"


@pytest.mark.skipif(not variants(), reason="the native kernels were not built: there is no C++ compiler")
def test_int8_and_fp16_states_cost_nothing_and_int4_less_than_a_hundredth_of_a_bit() -> None:
    loaded = load_checkpoint(MEASURED_MODEL)
    texts = [document.text for document in itertools.islice(read_documents(BOOKS, "test"), 1)]
    documents = [encode_document(loaded.tokenizer, text, 600) for text in texts]
    executors = make_executors(loaded.model, NSM_EXECUTORS, num_threads=1)
    readings = {name: [read(executor, document) for document in documents] for name, executor in executors.items()}
    num_bytes = sum(int(document.num_bytes.sum()) for document in documents)
    rows = {name: compare(name, readings[name], readings[REFERENCE], num_bytes) for name in NSM_EXECUTORS}
    assert abs(rows["native"].more) < 0.003
    assert abs(rows["native-int4"].more) < 0.02  # a part of a book lies around the mean of all
    assert abs(rows["native-fp16-states"].more - rows["native"].more) < 0.003
    assert rows["native"].agreement > 0.95
    assert rows["native-int4"].agreement > 0.85
