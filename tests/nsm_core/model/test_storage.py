"""Model files: what is written is what is read, and what does not fit is refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from nsm_core.chat_template import get_template
from nsm_core.config import ModelConfig
from nsm_core.errors import CheckpointError, ConfigError, NsmError
from nsm_core.formats.int4_groups import quantize_int4
from nsm_core.model.bundled import BUNDLED, CHECKPOINTS, bundled_name, find_checkpoint
from nsm_core.model.identity import fingerprint
from nsm_core.model.loader import load_checkpoint, open_checkpoint
from nsm_core.model.nsm import NsmModel
from nsm_core.model.storage import (
    WeightFormat,
    convert_model,
    is_rounded,
    quantize_rows,
    read_model,
    read_outline,
    save_model,
)
from nsm_core.tokenizer import Tokenizer, describe

CONFIG = ModelConfig(
    vocab_size=512, d_model=32, num_layers=2, num_heads=2, num_memory_slots=8, write_top_k=2, mlp_hidden=64
)


@pytest.fixture
def model() -> NsmModel:
    torch.manual_seed(3)
    model = NsmModel(CONFIG).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return model


@pytest.mark.parametrize(
    ("form", "tolerance"), [("fp32", 0.0), ("bf16", 2**-8), ("int8", 0.5 / 127 + 1e-3), ("int4", 0.1)]
)
def test_weights_survive_within_their_format(
    model: NsmModel, tiny_tokenizer: Tokenizer, tmp_path: Path, form: str, tolerance: float
) -> None:
    save_model(model, tiny_tokenizer, tmp_path, WeightFormat(form))
    read, tokenizer, read_form = read_model(tmp_path)
    assert read_form == form
    assert tokenizer.fingerprint == tiny_tokenizer.fingerprint
    assert read.config == CONFIG
    for name, want in model.state_dict().items():
        got = read.state_dict()[name]
        limit = tolerance * want.abs().amax() if want.ndim >= 2 else 0.0
        assert (got - want).abs().max() <= limit, name


def test_sensitive_parts_keep_more_bits_in_int8_files(
    model: NsmModel, tiny_tokenizer: Tokenizer, tmp_path: Path
) -> None:
    save_model(model, tiny_tokenizer, tmp_path, WeightFormat.INT8)
    read, _, _ = read_model(tmp_path)
    for name in ("blocks.0.mixer.router.logits.weight", "blocks.1.mixer.initial_slots"):
        want = model.state_dict()[name]
        assert torch.equal(read.state_dict()[name], want.half().float())


@pytest.mark.parametrize(
    ("ending", "value", "words"),
    [
        (".int4_steps", None, "holds numbers of 4 bits without their grids"),
        (".int4_steps", 0, "has a grid beyond int8"),
        (".row_scale", torch.inf, "holds a number that is not finite"),
    ],
)
def test_damaged_int4_files_are_refused_by_name(
    model: NsmModel, tiny_tokenizer: Tokenizer, tmp_path: Path, ending: str, value: float | None, words: str
) -> None:
    save_model(model, tiny_tokenizer, tmp_path, WeightFormat.INT4)
    file, name = tmp_path / "weights.safetensors", f"blocks.1.mlp.up.weight{ending}"
    tensors = load_file(file)
    if value is None:
        del tensors[name]
    else:
        tensors[name] = torch.full_like(tensors[name], value)
    save_file(tensors, file, metadata={"format": "int4"})
    for read in (load_checkpoint, open_checkpoint):
        with pytest.raises(CheckpointError, match=rf"weights.safetensors: the tensor blocks.1.mlp.up.weight {words}"):
            read(tmp_path)


def test_a_model_is_converted_from_its_numbers(model: NsmModel, tiny_tokenizer: Tokenizer, tmp_path: Path) -> None:
    save_model(model, tiny_tokenizer, tmp_path / "int8", WeightFormat.INT8)
    convert_model(tmp_path / "int8", tmp_path / "int4", WeightFormat.INT4, chat_template="rwkv-v1")
    convert_model(tmp_path / "int4", tmp_path / "again", WeightFormat.INT4, chat_template=None)
    wide, narrow = (read_model(tmp_path / name)[0].state_dict() for name in ("int8", "int4"))
    for name, value in wide.items():
        is_small = not is_rounded(name, value)
        assert narrow[name].equal(value if is_small else quantize_int4(value).dense()), name
    first, again = ((tmp_path / name / "weights.safetensors").read_bytes() for name in ("int4", "again"))
    assert first == again
    assert load_checkpoint(tmp_path / "again").chat_template == "rwkv-v1"


def test_row_scales_keep_a_small_row_beside_a_large_one() -> None:
    weight = torch.tensor([[1000.0, -500.0], [1e-3, 5e-4]])
    quantized, scale = quantize_rows(weight)
    torch.testing.assert_close(quantized.float() * scale[:, None], weight, rtol=0.01, atol=0.0)
    zero, zero_scale = quantize_rows(torch.zeros(1, 4))
    assert (zero.float() * zero_scale == 0).all()


def test_the_fingerprint_covers_config_weights_and_tokenizer(
    model: NsmModel, tiny_tokenizer: Tokenizer, tmp_path: Path
) -> None:
    save_model(model, tiny_tokenizer, tmp_path, WeightFormat.FP32)
    first = fingerprint(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(json.loads((tmp_path / "config.json").read_text())))
    assert fingerprint(tmp_path) == first  # the same config, laid out differently
    seen = {first}
    for name in ("config.json", "weights.safetensors", "tokenizer.json"):
        file, raw = tmp_path / name, (tmp_path / name).read_bytes()
        file.write_bytes(raw.replace(b'"taper": 0.1', b'"taper": 0.2') if name == "config.json" else raw + b" ")
        seen.add(fingerprint(tmp_path))
        file.write_bytes(raw)
    assert len(seen) == 4
    assert fingerprint(tmp_path) == first


def test_X24_every_model_directory_describes_its_tokenizer(
    model: NsmModel, tiny_tokenizer: Tokenizer, tmp_path: Path
) -> None:
    save_model(model, tiny_tokenizer, tmp_path / "new", WeightFormat.FP32)
    bundled = [path for path in CHECKPOINTS.iterdir() if (path / "config.json").exists()]
    assert len(bundled) >= 2
    for directory in (tmp_path / "new", *bundled):
        template = get_template(ModelConfig.load(directory / "config.json").chat_template)
        assert json.loads((directory / "tokenizer_config.json").read_text()) == describe(template, tiny_tokenizer)


def break_config(directory: Path) -> None:
    fields = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**fields, "num_slots": 3}))


def widen_config(directory: Path) -> None:
    fields = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**fields, "mlp_hidden": 128}))


def change_config(**changes: object):  # type: ignore[no-untyped-def]
    def change(directory: Path) -> None:
        fields = json.loads((directory / "config.json").read_text())
        (directory / "config.json").write_text(json.dumps({**fields, **changes}))

    return change


def forget_a_size(directory: Path) -> None:
    fields = json.loads((directory / "config.json").read_text())
    del fields["num_heads"]
    (directory / "config.json").write_text(json.dumps(fields))


def shrink_vocabulary(directory: Path) -> None:
    fields = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**fields, "vocab_size": 100}))


def cut_weights(directory: Path) -> None:
    file = directory / "weights.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])


def point_to_weights(directory: Path) -> None:
    (directory / "weights.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:1\n")


def lengthen_weights(directory: Path) -> None:
    with (directory / "weights.safetensors").open("ab") as file:
        file.write(b"\0")


def remove(name: str):  # type: ignore[no-untyped-def]
    return lambda directory: (directory / name).unlink()


def test_a_config_file_that_lacks_a_field_means_its_default(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    gated = ModelConfig(layer_pattern="G", gate="lstm", gate_chunk=8)
    file.write_text(gated.to_json())
    assert ModelConfig.load(file) == gated
    file.write_text('{"layer_pattern": "G", "gate": "lstm", "gate_chunk": 8}')
    assert ModelConfig.load(file) == gated


@pytest.mark.parametrize(
    ("damage", "error", "words"),
    [
        (break_config, ConfigError, "num_slots"),
        (forget_a_size, CheckpointError, "does not fit"),
        (widen_config, CheckpointError, "does not fit"),
        (shrink_vocabulary, CheckpointError, "512 tokens"),
        (
            change_config(d_model=10**9),
            ConfigError,
            r"d_model must be a whole number in \[1, 1048576\], got 1000000000",
        ),
        (change_config(num_layers=10**9), ConfigError, r"num_layers must be .* \[1, 1024\], got 1000000000"),
        (change_config(gate="tanh"), ConfigError, "gate must be one of gru, lstm, free, got 'tanh'"),
        (change_config(gate_chunk=48), ConfigError, "gate_chunk must be 1, 2, 4, 8, 16, 32 or 64, got 48"),
        (change_config(num_heads=True), ConfigError, "num_heads must be a whole number .* got True"),
        (change_config(d_model=2**20, mlp_hidden=2**20), CheckpointError, "does not fit"),
        (
            cut_weights,
            CheckpointError,
            r"weights.safetensors: the tensor \S+ takes \d+ bytes .* has \d+: it is cut short or damaged$",
        ),
        (point_to_weights, CheckpointError, r"weights.safetensors is no .safetensors file: it is a Git LFS pointer"),
        (lengthen_weights, CheckpointError, r"cannot read weights .*weights.safetensors: "),
        (remove("config.json"), CheckpointError, "it has no config.json"),
        (remove("weights.safetensors"), CheckpointError, "it has no weights.safetensors$"),
        (remove("tokenizer.json"), CheckpointError, "tokenizer.json"),
    ],
)
def test_damaged_files_are_refused_by_name(
    model: NsmModel, tiny_tokenizer: Tokenizer, tmp_path: Path, damage, error: type[NsmError], words: str
) -> None:
    save_model(model, tiny_tokenizer, tmp_path, WeightFormat.INT8)
    damage(tmp_path)
    with pytest.raises(error, match=words):
        load_checkpoint(tmp_path)


def test_outline_of_cut_weights_is_refused_as_the_model_is(
    model: NsmModel, tiny_tokenizer: Tokenizer, tmp_path: Path
) -> None:
    save_model(model, tiny_tokenizer, tmp_path, WeightFormat.INT8)
    cut_weights(tmp_path)
    with pytest.raises(CheckpointError, match=r"the tensor \S+ takes .*: it is cut short or damaged$"):
        read_outline(tmp_path)


def test_a_loaded_model_starts_with_a_fair_load(model: NsmModel, tiny_tokenizer: Tokenizer, tmp_path: Path) -> None:
    """The load is not stored: it must not be whatever the memory held."""
    save_model(model, tiny_tokenizer, tmp_path, WeightFormat.FP32)
    for block in read_model(tmp_path)[0].layers:
        assert (block.mixer.router.slot_load == CONFIG.write_top_k / CONFIG.num_memory_slots).all()


def test_a_directory_goes_before_a_bundled_model_of_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert find_checkpoint(Path("pulse-books-small")) == CHECKPOINTS / "pulse-books-small"
    (tmp_path / "pulse-books-small").mkdir()
    assert find_checkpoint(Path("pulse-books-small")) == Path("pulse-books-small")


def test_a_bundled_model_is_known_by_its_fingerprint_and_no_other_is() -> None:
    assert bundled_name(fingerprint(CHECKPOINTS / "pulse-books-small")) == "pulse-books-small"
    assert bundled_name("0" * 64) is None


def test_unknown_name_lists_the_bundled_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        CheckpointError, match=r"no model pulse-boks: expected .*\(pulse-books, pulse-books-keyed, pulse-books-small\)$"
    ):
        find_checkpoint(Path("pulse-boks"))


def test_a_missing_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nowhere: expected a model's file or directory"):
        load_checkpoint(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("name", "most_bytes"),
    [(None, 45_000_000), ("pulse-books", 45_000_000), ("pulse-books-small", 8_000_000)],
    ids=["default", "slots", "small"],
)
def test_the_bundled_models_are_whole_and_small_enough(name: str | None, most_bytes: int) -> None:
    path = None if name is None else Path(name)
    loaded = load_checkpoint(path)
    assert loaded.name == (name or BUNDLED.name)
    assert loaded.weight_format == "int8"
    assert sum(file.stat().st_size for file in find_checkpoint(path).iterdir()) <= most_bytes
    assert loaded.tokenizer.vocab_size == loaded.config.vocab_size
    assert all(value.isfinite().all() for value in loaded.model.state_dict().values())
    prompt = loaded.tokenizer.encode("He said nothing, but shook his")
    hidden, _ = loaded.model(torch.tensor([[loaded.tokenizer.end_of_text_id, *prompt]]), loaded.model.initial_state(1))
    best = loaded.model.logits(hidden[0, -1]).topk(5).indices
    assert " head" in [loaded.tokenizer.decode([token]) for token in best.tolist()]
