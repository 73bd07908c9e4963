"""The same model in every layout is the same model; what cannot be served ends with one line that says why."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from nsm_core.errors import CheckpointError
from nsm_core.rwkv7.claims import claims
from nsm_core.rwkv7.opening import open_files
from nsm_core.rwkv7.tensors import tensor_shapes
from nsm_core.tokenizer import BpeTokenizer, Tokenizer
from nsm_core.world_tokenizer import WorldTokenizer
from tests.support.model_files import write_gguf, write_pth, write_safetensors
from tests.support.rwkv7_files import (
    CONFIG,
    WRITERS,
    gguf_keys,
    gguf_tensors,
    hugging_face_tensors,
    model_tensors,
    with_vocabulary,
    write_hugging_face,
)
from tests.support.world_vocabulary import world_tokenizer

TENSORS = model_tensors()


@pytest.mark.parametrize("layout", WRITERS)
def test_every_layout_gives_the_tensors_of_the_official_one(tmp_path: Path, layout: str) -> None:
    path = WRITERS[layout](tmp_path, TENSORS)
    assert claims(path)
    files = open_files(path)
    shapes = tensor_shapes(CONFIG)
    assert files.config == CONFIG if "face" not in layout else files.config.head_norm_eps == 16e-5
    assert dict(files.tensors).keys() == shapes.keys()
    for name, shape in shapes.items():
        value = files.tensors[name]
        assert value.shape == shape, name
        assert torch.equal(value, TENSORS[name]), name
    assert (files.weight_format, files.chat_template) == ("fp32", "rwkv-v1")
    assert isinstance(files.tokenizer, WorldTokenizer)
    assert files.tokenizer.vocab_size == CONFIG.vocab_size
    assert files.tokenizer.fingerprint == world_tokenizer(CONFIG.vocab_size).fingerprint


def test_equal_numbers_in_official_names_have_one_fingerprint(tmp_path: Path) -> None:
    first, second = (open_files(WRITERS[layout](tmp_path, TENSORS)) for layout in ("pth", "safetensors"))
    assert first.fingerprint == second.fingerprint
    other = model_tensors(seed=1)
    assert open_files(WRITERS["pth"](tmp_path, other)).fingerprint != first.fingerprint


@pytest.mark.parametrize("changed", ["head.weight", "blocks.2.att.r_k", "blocks.0.att.x_r"])
def test_one_other_number_is_another_fingerprint(tmp_path: Path, changed: str) -> None:
    fingerprints = set()
    for step in (0.0, 1.0):
        tensors = TENSORS | {changed: TENSORS[changed].clone()}
        tensors[changed].view(-1)[-1] += step
        fingerprints.add(open_files(WRITERS["gguf"](tmp_path, tensors)).fingerprint)
    assert len(fingerprints) == 2


@pytest.mark.parametrize(("dtype", "weight_format"), [(torch.bfloat16, "bf16"), (torch.float16, "fp16")])
def test_half_precision_stays_as_it_is(tmp_path: Path, dtype: torch.dtype, weight_format: str) -> None:
    halves = {name: value.to(dtype) for name, value in TENSORS.items()}
    files = open_files(WRITERS["pth"](tmp_path, halves))
    assert files.weight_format == weight_format
    assert all(value.dtype == dtype for value in files.tensors.values())


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_K", "Q6_K"])
def test_a_quantised_gguf_file_opens_as_floating_point(tmp_path: Path, kind: str) -> None:
    wide = model_tensors(changed := _wide())
    path = write_gguf(tmp_path / "model.gguf", gguf_tensors(wide), gguf_keys(changed), kind=kind)
    files = open_files(path)
    assert files.weight_format == "int8"
    assert files.tensors["blocks.1.ffn.key.weight"].dtype == torch.float32
    if kind == "Q8_0":
        error = (files.tensors["emb.weight"] - wide["emb.weight"]).abs().max()
        assert 0 < error < 0.05


def _wide() -> Any:
    from tests.support.rwkv7 import small_config

    return small_config(vocab_size=640, width=256, num_layers=3, hidden=256)


def test_a_tokenizer_json_beside_the_weights_is_read(tmp_path: Path, tiny_tokenizer: Tokenizer) -> None:
    tiny_tokenizer.save(tmp_path / "tokenizer.json")
    files = open_files(write_pth(tmp_path / "model.pth", TENSORS))
    assert isinstance(files.tokenizer, BpeTokenizer)
    assert files.tokenizer.vocab_size == CONFIG.vocab_size > tiny_tokenizer.vocab_size
    assert files.tokenizer.token_bytes(CONFIG.vocab_size - 1) == b""


def test_a_bpe_vocabulary_inside_of_a_gguf_file_encodes_as_its_tokenizer_json(
    tmp_path: Path, tiny_tokenizer: BpeTokenizer
) -> None:
    model = json.loads(tiny_tokenizer.to_json())["model"]
    keys = {name: value for name, value in gguf_keys().items() if not name.startswith("tokenizer")}
    keys |= {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": sorted(model["vocab"], key=model["vocab"].__getitem__),
        "tokenizer.ggml.merges": [" ".join(pair) for pair in model["merges"]],
        "tokenizer.ggml.eos_token_id": 0,
    }
    tokenizer = open_files(write_gguf(tmp_path / "model.gguf", gguf_tensors(TENSORS), keys)).tokenizer
    for text in ("It is a truth universally acknowledged, that", "a  B\r\n\té ﬁ <|endoftext|> 日本"):
        assert tokenizer.encode(text) == tiny_tokenizer.encode(text)


def test_the_heads_weights_may_be_the_embeddings(tmp_path: Path) -> None:
    tensors = hugging_face_tensors(TENSORS)
    del tensors["lm_head.weight"]
    files = open_files(write_hugging_face(tmp_path / "hf", tensors, tie_word_embeddings=True))
    assert torch.equal(files.tensors["head.weight"], TENSORS["emb.weight"])


def refusal(path: Path) -> str:
    assert claims(path)
    with pytest.raises(CheckpointError) as refused:
        open_files(path)
    message = str(refused.value)
    assert "\n" not in message
    assert str(path) in message
    return message


Change = Callable[[dict[str, torch.Tensor]], object]


def _without(name: str) -> Change:
    return lambda tensors: tensors.pop(name)


def _with(name: str, *shape: int) -> Change:
    return lambda tensors: tensors.update({name: torch.zeros(shape)})


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (_without("blocks.1.att.w1"), "the tensor blocks.1.att.w1 is missing"),
        (_without("blocks.1.att.v1"), "the tensor blocks.1.att.v1 is missing"),
        (_without("blocks.0.ln0.bias"), "the tensor blocks.0.ln0.bias is missing"),
        (_without("head.weight"), "the tensor head.weight is missing"),
        (_without("emb.weight"), "are those of another architecture than RWKV-7"),
        (_with("emb.weight", 640), "the tensor emb.weight has the shape [640], and must be a matrix"),
        (_with("emb.weight", 640, 63), "width (63) must be a multiple of head_size (16)"),
        (_with("blocks.2.att.key.weight", 64, 63), "the tensor blocks.2.att.key.weight has the shape [64, 63]"),
        (_with("blocks.2.att.w1", 16, 64), "the tensor blocks.2.att.w1 has the shape [16, 64]"),
        (_with("blocks.1.att.x_r", 1, 1, 65), "the tensor blocks.1.att.x_r has the shape [1, 1, 65]"),
        (_with("blocks.1.att.time_state", 4, 16, 16), "the tensor blocks.1.att.time_state is none of an RWKV-7 model"),
        (_with("blocks.0.att.time_decay", 64), "the tensor blocks.0.att.time_decay is of RWKV-6 or older"),
        (_with("blocks.7777.att.w1", 64, 16), "num_layers must be a whole number in [1, 1024], got 7778"),
        (_with("blocks.5.att.w1", 64, 16), "the tensor blocks.3.ln1.weight is missing"),
        (_with("blocks.0.ffn.key.weight", 0, 64), "hidden must be a whole number in [1, 1048576], got 0"),
    ],
)
def test_a_model_that_does_not_fit_is_refused_by_file_and_tensor(tmp_path: Path, change: Change, says: str) -> None:
    tensors = dict(TENSORS)
    change(tensors)
    assert says in refusal(with_vocabulary(write_safetensors(tmp_path / "model.safetensors", tensors)))


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("rwkv7.block_count", 4, "there are 3 layers, and its configuration says 4"),
        ("rwkv7.embedding_length", 65, "64 numbers in a row of the embedding, and its configuration says 65"),
        ("tokenizer.ggml.model", "llama", "the vocabulary is of the kind 'llama'; read are 'rwkv' and 'gpt2'"),
        ("tokenizer.ggml.tokens", ["a"] * 641, "the vocabulary has 641 tokens, the model's embedding 640"),
        ("tokenizer.ggml.tokens", ["a"] * 640, "no empty token and no token twice"),
        ("tokenizer.ggml.tokens", 3, "tokenizer.ggml.tokens is missing"),
        ("tokenizer.ggml.token_type", [1, 2], "tokenizer.ggml.token_type does not fit the tokens"),
    ],
)
def test_a_gguf_file_whose_keys_do_not_fit_is_refused(tmp_path: Path, key: str, value: Any, says: str) -> None:
    keys = gguf_keys() | {key: value}
    assert says in refusal(write_gguf(tmp_path / "model.gguf", gguf_tensors(TENSORS), keys))


def test_another_architecture_in_a_gguf_file_is_refused(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", {"token_embd.weight": torch.zeros(2, 2)}, {}, architecture="mamba2")
    assert "the architecture is 'mamba2'; served is 'rwkv7'" in refusal(path)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "the architecture is 'LlamaForCausalLM'"),
        ({"num_hidden_layers": 4}, "there are 3 layers, and its configuration says 4"),
        ({"hidden_size": float("nan")}, "hidden_size must be a whole number above 0, got nan"),
        ({"num_hidden_layers": 10**400}, "num_hidden_layers must be a whole number"),
        ({"norm_eps": float("nan")}, "norm_eps must be a number from 0 to 1, got nan"),
        ({"attn": {"layers": [1]}}, "layers of attention"),
        ({"hidden_act": "gelu"}, "another hidden_act than sqrelu"),
    ],
)
def test_a_hugging_face_config_that_does_not_fit_is_refused(tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    assert says in refusal(write_hugging_face(tmp_path / "hf", hugging_face_tensors(TENSORS), **changes))


@pytest.mark.parametrize(
    ("part", "says"),
    [
        ("model.safetensors.index.json", "is in 'model.safetensors.index.json': no part's name"),
        ("../hf/model-00001-of-00002.safetensors", "no part's name"),
        ("/etc/passwd", "no part's name"),
        ("..", "no part's name"),
        (3, "is in '3': no part's name"),
        ("model-00002-of-00002.safetensors", "is in this part, and model.safetensors.index.json does not say so"),
    ],
)
def test_an_index_that_leads_elsewhere_is_refused(tmp_path: Path, part: object, says: str) -> None:
    path = write_hugging_face(tmp_path / "hf", hugging_face_tensors(TENSORS), num_parts=2)
    index = path / "model.safetensors.index.json"
    fields = json.loads(index.read_text())
    fields["weight_map"]["model.embeddings.weight"] = part
    index.write_text(json.dumps(fields))
    assert says in refusal(path)


def test_a_tensor_that_its_part_lacks_is_missing(tmp_path: Path) -> None:
    path = write_hugging_face(tmp_path / "hf", hugging_face_tensors(TENSORS), num_parts=2)
    index = path / "model.safetensors.index.json"
    fields = json.loads(index.read_text())
    fields["weight_map"]["another"] = "model-00001-of-00002.safetensors"
    index.write_text(json.dumps(fields))
    assert "model-00001-of-00002.safetensors: the tensor another is missing" in refusal(path)


@pytest.mark.parametrize("text", ["", "[1]", "{", '{"weight_map": 3}', "[" * 100_000])
def test_an_index_that_is_none_is_refused(tmp_path: Path, text: str) -> None:
    path = write_hugging_face(tmp_path / "hf", hugging_face_tensors(TENSORS), num_parts=2)
    (path / "model.safetensors.index.json").write_text(text)
    assert "model.safetensors.index.json" in refusal(path)


def test_a_vocabulary_larger_than_the_embedding_is_refused(tmp_path: Path) -> None:
    small = model_tensors(_small_vocabulary())
    assert "the tensor emb.weight only 300 rows" in refusal(with_vocabulary(write_pth(tmp_path / "model.pth", small)))


def _small_vocabulary() -> Any:
    from tests.support.rwkv7 import small_config

    return small_config(vocab_size=300)


def test_a_folder_of_several_files_asks_for_one(tmp_path: Path) -> None:
    for name in ("a.pth", "b.pth"):
        write_pth(tmp_path / name, TENSORS)
    assert "not one file of weights (a.pth, b.pth): give its path" in refusal(tmp_path)


LFS_POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 382164736\n"
WEB_PAGE = b"\n<!DOCTYPE html>\n<html><head><title>Log in</title></head></html>"


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (b"", "GGUF: it is empty"),
        (b"Entry not found\n", "GGUF: it holds the text 'Entry not found\\n'"),
        (b'{"error": "Repository not found"}', """GGUF: it holds the text '{"error": "Repository not found"}'"""),
        (b"\x80\x02}q\x00.", "GGUF: it has 6 bytes of another form"),
        (LFS_POINTER, "GGUF: it is a Git LFS pointer, `git lfs pull` fetches the file itself"),
        (WEB_PAGE, "GGUF: it is a web page"),
        (b"\x1f\x8b\x08" + b"0" * 99, "GGUF: it is compressed, unpack it first"),
        (b"\0" * 9999, "GGUF: it begins with zeros, as an unfinished download does"),
    ],
)
def test_a_file_of_no_known_form_is_refused_by_what_it_is(tmp_path: Path, raw: bytes, says: str) -> None:
    path = tmp_path / "model.pth"
    path.write_bytes(raw)
    assert f"is none of .pth (a zip archive), .safetensors and {says}" in refusal(path)


def test_a_file_of_the_old_pytorch_format_is_refused_by_its_name(tmp_path: Path) -> None:
    torch.save(TENSORS, path := tmp_path / "model.pth", _use_new_zipfile_serialization=False)  # noqa: TID251
    assert "it is in PyTorch's format before 1.6" in refusal(path)


@pytest.mark.parametrize(
    ("raw", "says"), [(LFS_POINTER, "a Git LFS pointer"), (WEB_PAGE, "a web page"), (b"", "empty")]
)
def test_a_part_that_was_not_downloaded_is_refused_by_its_name(tmp_path: Path, raw: bytes, says: str) -> None:
    path = write_hugging_face(tmp_path / "hf", hugging_face_tensors(TENSORS), num_parts=2)
    (path / "model-00002-of-00002.safetensors").write_bytes(raw)
    assert f"model-00002-of-00002.safetensors is neither .safetensors nor a PyTorch file of tensors: it is {says}" in (
        refusal(path)
    )


def test_a_part_or_an_index_alone_asks_for_the_directory(tmp_path: Path) -> None:
    path = write_hugging_face(tmp_path / "hf", hugging_face_tensors(TENSORS), num_parts=2)
    assert "give the directory" in refusal(path / "model-00002-of-00002.safetensors")
    assert "it is an index of parts, give the directory" in refusal(path / "model.safetensors.index.json")


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ({"blocks.0.att.key.lora_A": torch.zeros(8, 64)}, "the tensor blocks.0.att.key.lora_A is an adapter's (LoRA)"),
        ({"blocks.0.att.time_state": torch.zeros(4, 16, 16)}, "the tensor blocks.0.att.time_state is a start state's"),
        ({"model": TENSORS, "step": 3}, "the tensors are in a dictionary of their own, 'model': save it alone"),
        ({}, "the tensors (none, ...) are those of another architecture"),
    ],
)
def test_a_file_without_a_whole_model_is_refused_by_what_it_has(tmp_path: Path, value: Any, says: str) -> None:
    assert says in refusal(write_pth(tmp_path / "model.pth", value))


@pytest.mark.parametrize("written", ["pth", "safetensors", "gguf"])
@pytest.mark.parametrize("suffix", ["pth", "safetensors", "gguf", "bin"])
def test_a_file_with_another_formats_ending_opens_by_its_content(tmp_path: Path, written: str, suffix: str) -> None:
    path = WRITERS[written](tmp_path, TENSORS)
    assert open_files(path.rename(path.with_suffix(f".{suffix}"))).config == CONFIG


def test_a_file_of_hugging_faces_layout_asks_for_its_directory(tmp_path: Path) -> None:
    path = write_hugging_face(tmp_path / "hf", hugging_face_tensors(TENSORS)) / "model.safetensors"
    assert "give its directory" in refusal(path)


def test_a_part_that_is_not_there_is_named(tmp_path: Path) -> None:
    path = write_hugging_face(tmp_path / "hf", hugging_face_tensors(TENSORS), num_parts=2)
    (path / "model-00001-of-00002.safetensors").unlink()
    assert "model-00001-of-00002.safetensors: No such file or directory" in refusal(path)


def test_directories_of_other_models_are_left_to_their_loaders(tmp_path: Path) -> None:
    assert not claims(tmp_path / "missing")
    assert not claims(tmp_path)
    (tmp_path / "config.json").write_text('{"layer_pattern": "N"}')
    assert not claims(tmp_path)
    (tmp_path / "config.json").write_text("{")
    assert not claims(tmp_path)


def test_a_directory_that_rwkv7_hf_wrote_opens_as_the_file_it_was_made_from(tmp_path: Path) -> None:
    converter = pytest.importorskip("rwkv7_hf.converter")
    from tests.support.rwkv7 import small_config

    tensors = model_tensors(small_config(vocab_size=640, width=128, num_layers=3, head_size=64, value_rank=8))
    path = with_vocabulary(write_pth(tmp_path / "model.pth", tensors))
    out = tmp_path / "hf"
    converter.main(["--input", str(path), "--output", str(out), "--precision", "fp32", "--max-shard-size", "500KB"])
    with_vocabulary(out)
    first, second = open_files(path), open_files(out)
    assert first.config == second.config
    assert all(torch.equal(first.tensors[name], second.tensors[name]) for name in first.tensors)
    assert "User: " in second.chat_template
