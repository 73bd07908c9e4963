"""The bundled data are whole: the counts that data/README.md states."""

from __future__ import annotations

from nsm_core.tokenizer import Tokenizer
from tests.support import samples


def test_the_bundled_data_are_whole() -> None:
    assert [len(samples.sample_texts(split)) for split in ("train", "val", "test")] == [8, 3, 3]
    assert len(samples.naughty_strings()) == 361
    assert len(samples.multilingual_texts()) == 50
    assert len(samples.grapheme_strings()) == 602
    assert len(samples.json_parsing_cases()) == 318
    assert len(samples.listops_lines()) == 100
    assert [samples.babi_text(task).count("?") for task in (1, 2)] == [100, 60]
    assert len(samples.shakespeare_text()) == 1_115_394


def test_byte_cases_decode_as_they_say() -> None:
    cases = samples.utf8_byte_cases()
    assert len(cases) == 79
    for raw, replaced in cases:
        assert raw.decode("utf-8", "replace") == replaced


def test_the_tiny_tokenizer_has_learned_some_english(tiny_tokenizer: Tokenizer) -> None:
    assert tiny_tokenizer.vocab_size == 512
    assert len(tiny_tokenizer.encode(" the")) == 1
