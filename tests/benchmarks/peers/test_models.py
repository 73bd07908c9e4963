"""The random models of the peers: their size, and that gguf's own reader reads them, where it is installed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.measured_model import MEASURED_MODEL
from benchmarks.peers.engine import rwkv7_kernels
from benchmarks.peers.models import MATRIX, PEERS, TOKENIZER, VOCAB_SIZE, WIDTH, write_model
from nsm_core.execution.native.library import variants
from nsm_core.model.loader import load_checkpoint


@pytest.mark.parametrize("name", PEERS)
def test_a_peer_has_as_many_weights_as_the_measured_model(name: str) -> None:
    loaded = load_checkpoint(MEASURED_MODEL)
    assert (loaded.config.d_model, loaded.config.vocab_size) == (WIDTH, VOCAB_SIZE)
    ours = sum(parameter.numel() for parameter in loaded.model.parameters())
    assert PEERS[name].num_weights == pytest.approx(ours, rel=0.02)


@pytest.mark.parametrize("name", PEERS)
def test_all_but_small_weights_are_int8(name: str) -> None:
    tensors = list(PEERS[name].tensors())
    assert len({tensor.name for tensor in tensors}) == len(tensors)
    assert all(tensor.shape[-1] % 32 == 0 for tensor in tensors if tensor.kind == MATRIX)
    small = sum(tensor.size for tensor in tensors if tensor.kind != MATRIX)
    assert small < 0.02 * PEERS[name].num_weights


@pytest.mark.other_library
@pytest.mark.parametrize("name", PEERS)
def test_ggufs_reader_reads_what_was_written(name: str, tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    file = tmp_path / f"{name}.gguf"
    write_model(PEERS[name], file)
    reader = gguf.GGUFReader(file)
    keys = {key: field.contents() for key, field in reader.fields.items()}
    assert (keys["general.architecture"], keys[f"{name}.block_count"]) == (name, PEERS[name].keys["block_count"])
    vocabulary = json.loads(TOKENIZER.read_text("utf-8"))["model"]["vocab"]
    assert [vocabulary[token] for token in keys["tokenizer.ggml.tokens"]] == list(range(VOCAB_SIZE))
    written = {tensor.name: tensor for tensor in reader.tensors}
    for tensor in PEERS[name].tensors():
        assert tuple(written[tensor.name].shape) == tensor.shape[::-1]  # ggml counts from the other end
        assert written[tensor.name].tensor_type.name == tensor.kind


@pytest.mark.other_library
@pytest.mark.skipif(not variants(), reason="the native kernels are not built")
def test_our_kernels_run_llama_cpps_rwkv7(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    file = tmp_path / "rwkv7.gguf"
    write_model(PEERS["rwkv7"], file)
    found = rwkv7_kernels(file, max_batch=2).decode_and_prefill(batches=[1, 2], num_tokens=2, lengths=[8])
    assert sorted(found) == ["decode.1.tokens_per_cpu_s", "decode.2.tokens_per_cpu_s", "prefill.8.tokens_per_cpu_s"]
    assert min(found.values()) > 0
