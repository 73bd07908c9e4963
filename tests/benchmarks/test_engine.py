from __future__ import annotations

from benchmarks.engine import header
from nsm_core.tokenizer import Tokenizer
from nsm_lab.bench.machine import machine
from tests.nsm_core.engine.harness import small_model
from tests.support.models import as_loaded


def test_the_processor_is_named(tiny_tokenizer: Tokenizer) -> None:
    about = header(as_loaded(small_model(), tiny_tokenizer), threads=1)
    assert about["cpu"] == machine()["cpu"]
    assert about["cpu"].strip() != ""
