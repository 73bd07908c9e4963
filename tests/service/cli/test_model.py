"""`nsm model`: what files hold, and the same model as a directory of its own."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from nsm_core.architectures import ARCHITECTURES
from nsm_core.rwkv7.opening import open_files
from service.cli.model import FILES
from tests.service.cli.conftest import Nsm, no_model
from tests.support.model_files import write_pth
from tests.support.rwkv7_files import CONFIG, WRITERS, model_tensors, write_hugging_face

TENSORS = model_tensors()


def assert_one_line_with(stderr: str, message: str) -> None:
    assert stderr.startswith("nsm: ")
    assert message in stderr
    assert stderr.count("\n") == 1


@pytest.mark.parametrize(("layout", "files"), [("gguf", "GGUF"), ("hugging face", "Hugging Face"), ("pth", "PyTorch")])
def test_inspect_reports_an_rwkv7_model(nsm: Nsm, tmp_path: Path, layout: str, files: str) -> None:
    result = nsm("model", "inspect", WRITERS[layout](tmp_path, TENSORS), "--json")
    assert result.exit_code == 0, result.stderr
    facts = json.loads(result.stdout)
    assert facts["architecture"] == "rwkv7"
    assert facts["files"] == files
    assert (facts["layers"], facts["width"], facts["vocabulary"]) == (3, 64, CONFIG.vocab_size)
    assert facts["state_bytes"] == 8 + 4 * CONFIG.num_layers * CONFIG.width * (CONFIG.head_size + 2)
    assert facts["tokenizer"] == "WorldTokenizer, 556 tokens of text"
    assert facts["chat_template"] == "rwkv-v1"


def test_every_architecture_is_described_and_converted() -> None:
    assert FILES.keys() == {architecture.name for architecture in ARCHITECTURES}


def test_inspect_reads_headers_alone(nsm: Nsm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = WRITERS["pth"](tmp_path, TENSORS)
    monkeypatch.setattr("nsm_core.formats.stored_tensor.StoredTensor.read", None)
    monkeypatch.setattr("nsm_core.formats.stored_tensor.StoredTensor.chunks", None)
    result = nsm("model", "inspect", path)
    assert result.exit_code == 0, result.stderr
    assert "state bytes    13,832" in result.stdout


def test_inspect_says_what_is_missing_and_what_is_replaced(
    nsm: Nsm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nsm_core.world_tokenizer.VOCABULARY_PACKAGES", ())
    path = write_pth(tmp_path / "model.pth", TENSORS)
    (tmp_path / "chat_template.jinja").write_text("{{ messages | length }}")
    facts = json.loads(nsm("model", "inspect", path, "--json").stdout)
    assert facts["tokenizer"].startswith("missing: no tokenizer for the model in")
    assert facts["chat_template"] == "rwkv-v1"
    assert "turn by turn" in facts["chat_template_note"]


def test_inspect_reports_a_model_of_this_project(nsm: Nsm, model_dir: Path) -> None:
    facts = json.loads(nsm("model", "inspect", model_dir, "--json").stdout)
    assert (facts["architecture"], facts["chat_template"]) == ("nsm", "plain-v1")


def test_a_file_that_is_no_model_ends_with_one_line(nsm: Nsm, tmp_path: Path) -> None:
    path = tmp_path / "model.pth"
    path.write_bytes(b"PK\x03\x04" + b"\0" * 100)
    for command in (("inspect", path), ("convert", path, "--out", tmp_path / "out")):
        result = nsm("model", *command)
        assert result.exit_code == 1
        assert_one_line_with(result.stderr, "model.pth is cut short or damaged")
    assert not (tmp_path / "out").exists()


def test_a_path_without_a_model_has_the_same_words_in_both_commands(nsm: Nsm, tmp_path: Path, model_dir: Path) -> None:
    empty, weightless = tmp_path / "empty", tmp_path / "weightless"
    empty.mkdir()
    weightless.mkdir()
    shutil.copy(model_dir / "config.json", weightless)
    for given, words in (
        ("nope.pth", f"{no_model('nope.pth')}\n"),
        (tmp_path / "nope.pth", f"{no_model(tmp_path / 'nope.pth')}\n"),
        (empty, f"no model in {empty}: it has no config.json\n"),
        (weightless, f"no model in {weightless}: it has no weights.safetensors\n"),
    ):
        found = [
            nsm("model", *command) for command in (("inspect", given), ("convert", given, "--out", tmp_path / "o"))
        ]
        assert [result.exit_code for result in found] == [1, 1]
        assert found[0].stderr == found[1].stderr
        assert_one_line_with(found[0].stderr, words)


def test_convert_writes_a_directory_that_opens(nsm: Nsm, tmp_path: Path) -> None:
    path = WRITERS["gguf"](tmp_path, TENSORS)
    out = tmp_path / "out"
    result = nsm("model", "convert", path, "--out", out, "--weight-format", "bf16")
    assert result.exit_code == 0, result.stderr
    assert result.stderr.startswith(f"{out}: ")
    files = open_files(out)
    assert (files.weight_format, files.chat_template) == ("bf16", "rwkv-v1")
    assert torch.equal(files.tensors["head.weight"], TENSORS["head.weight"].bfloat16())
    again = nsm("model", "convert", path, "--out", out)
    assert again.exit_code == 2
    assert_one_line_with(again.stderr, "is not a new or empty directory")


def test_convert_writes_this_projects_models_too(nsm: Nsm, tmp_path: Path, model_dir: Path) -> None:
    out = tmp_path / "out"
    result = nsm("model", "convert", model_dir, "--out", out, "--weight-format", "int4", "--chat-template", "rwkv-v1")
    assert result.exit_code == 0, result.stderr
    assert result.stderr.endswith("int4, chat template rwkv-v1\n")
    facts = json.loads(nsm("model", "inspect", out, "--json").stdout)
    assert (facts["weights"], facts["chat_template"]) == ("int4", "rwkv-v1")
    assert json.loads(nsm("info", "--model", out, "--json").stdout)["weights"] == "int4"
    refused = nsm("model", "convert", model_dir, "--out", tmp_path / "no", "--weight-format", "fp16")
    assert refused.exit_code == 2
    assert "can be int8, int4, bf16 or fp32" in refused.stderr


def test_convert_takes_a_template_by_name_or_file(nsm: Nsm, tmp_path: Path) -> None:
    path = WRITERS["pth"](tmp_path, TENSORS)
    jinja = tmp_path / "chat.jinja"
    jinja.write_text("{% for m in messages %}{{ '<' ~ m.role ~ '>' ~ m.content ~ '</s>' }}{% endfor %}<assistant>")
    assert nsm("model", "convert", path, "--out", tmp_path / "a", "--chat-template", jinja).exit_code == 0
    assert open_files(tmp_path / "a").chat_template == jinja.read_text()
    assert nsm("model", "convert", path, "--out", tmp_path / "b", "--chat-template", "rwkv-think-v1").exit_code == 0
    assert open_files(tmp_path / "b").chat_template == "rwkv-think-v1"
    refused = nsm("model", "convert", path, "--out", tmp_path / "c", "--chat-template", "other")
    assert refused.exit_code == 2
    assert_one_line_with(refused.stderr, "unknown chat template 'other'")


def test_convert_keeps_the_template_of_a_hugging_face_directory(nsm: Nsm, tmp_path: Path) -> None:
    from tests.support.rwkv7_files import hugging_face_tensors

    path = write_hugging_face(tmp_path / "hf", hugging_face_tensors(TENSORS))
    template = "{% for m in messages %}{{ '[' ~ m.role ~ ']' ~ m.content ~ '[/]' }}{% endfor %}[assistant]"
    (path / "tokenizer_config.json").write_text(
        json.dumps(
            {"chat_template": [{"name": "tool_use", "template": "x"}, {"name": "default", "template": template}]}
        )
    )
    assert nsm("model", "convert", path, "--out", tmp_path / "out").exit_code == 0
    assert open_files(tmp_path / "out").chat_template == template


def test_every_layout_writes_the_same_text(nsm: Nsm, tmp_path: Path) -> None:
    texts = set()
    for index, (name, write) in enumerate(WRITERS.items()):
        if "face" in name:  # heads of 16 have another epsilon there
            continue
        folder = tmp_path / str(index)
        folder.mkdir()
        path = write(folder, TENSORS)
        result = nsm("generate", "the theme", "--model", path, "--max-tokens", 24, "--seed", 1, "--ignore-eos")
        assert result.exit_code == 0, result.stderr
        texts.add(result.stdout)
    assert len(texts) == 1


def test_a_chat_with_a_file_and_a_template_of_jinja_goes_on_with_new_text_alone(nsm: Nsm, tmp_path: Path) -> None:
    path = WRITERS["gguf"](tmp_path, TENSORS)
    jinja = tmp_path / "chat.jinja"
    jinja.write_text("{% for m in messages %}{{ '[' ~ m.role ~ ']' ~ m.content ~ '[end]' }}{% endfor %}[assistant]")
    options = ("--model", path, "--session", "mine", "--max-tokens", 3, "--seed", 1)
    for message in ("Hello", "And?"):
        result = nsm("chat", *options, stdin=message, NSM_CHAT_TEMPLATE=str(jinja))
        assert result.exit_code == 0, result.stderr
    log = nsm("sessions", "log", "mine", "--model", path).stdout
    first, _, rest = log.partition("[user]Hello[end][assistant]")
    assert first.replace("<|endoftext|>", "") == ""
    assert rest.count("[end][user]And?[end][assistant]") == 1
    assert "Hello" not in rest
