"""Which architecture opens what is at a path, and what it says of the rest."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from nsm_core.architectures import ARCHITECTURES, architecture_of, identify, load_model, require_nsm
from nsm_core.errors import CheckpointError, ConfigError
from nsm_core.execution.choose import choose_executor
from nsm_core.execution.names import ExecutorName
from nsm_core.execution.native.library import variants
from nsm_core.tokenizer import Tokenizer
from tests.support.models import save_small_model
from tests.support.rwkv7 import random_rwkv7, save_rwkv7


def test_each_architecture_claims_its_own(tmp_path: Path, tiny_tokenizer: Tokenizer) -> None:
    nsm = save_small_model(tmp_path / "nsm", tiny_tokenizer)
    rwkv7 = save_rwkv7(tmp_path / "rwkv7", tiny_tokenizer)
    assert [architecture_of(path).name for path in (nsm, rwkv7)] == ["nsm", "rwkv7"]
    assert len({architecture.name for architecture in ARCHITECTURES}) == len(ARCHITECTURES)
    for path in (nsm, rwkv7):
        loaded = load_model(path)
        assert loaded.architecture == architecture_of(path).name
        assert identify(path)[0] == loaded.fingerprint
        assert identify(path)[1].fingerprint == loaded.tokenizer.fingerprint == tiny_tokenizer.fingerprint
        assert loaded.info.state_bytes == loaded.model.state_spec.num_bytes


def test_a_loaded_model_gives_the_files_logits(tmp_path: Path, tiny_tokenizer: Tokenizer) -> None:
    loaded, held = load_model(save_rwkv7(tmp_path / "rwkv7", tiny_tokenizer)), random_rwkv7(tiny_tokenizer)
    ids = torch.arange(20)[None]
    hidden, _ = loaded.model.forward(ids, loaded.model.initial_state(1))
    want, _ = held.model.forward(ids, held.model.initial_state(1))
    assert loaded.model.logits(hidden).equal(held.model.logits(want))
    assert loaded.num_parameters == held.num_parameters


def test_what_is_nobodys_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises((CheckpointError, ConfigError), match="nowhere"):
        load_model(tmp_path / "nowhere")


def test_commands_for_memory_slots_refuse_other_architectures(tiny_tokenizer: Tokenizer) -> None:
    with pytest.raises(ConfigError, match="random-rwkv7 is of the architecture rwkv7, which has no memory slots"):
        require_nsm(random_rwkv7(tiny_tokenizer))


@pytest.mark.skipif(not variants(), reason="the native kernels are not built")
@pytest.mark.parametrize(
    ("weight_format", "name", "chosen", "numerics"),
    [
        ("int8", "auto", "native", "cpu/int8/rwkv7-native-1"),
        ("bf16", "auto", "native-fp32", "cpu/fp32/rwkv7-native-1"),
        ("bf16", "native", "native", "cpu/int8/rwkv7-native-1"),
        ("bf16", "native-int4", "native-int4", "cpu/int4/rwkv7-native-1"),
        ("int4", "auto", "native-int4", "cpu/int4/rwkv7-native-1"),
        ("int8", "native-fp32", "native-fp32", "cpu/fp32/rwkv7-native-1"),
        ("int8", "eager", "eager", "cpu/fp32/torch"),
    ],
)
def test_the_executor_of_an_rwkv7_model(
    tiny_tokenizer: Tokenizer, weight_format: str, name: ExecutorName, chosen: str, numerics: str
) -> None:
    executor = choose_executor(random_rwkv7(tiny_tokenizer, weight_format=weight_format), name)
    assert executor.name == chosen
    assert executor.numerics.startswith(numerics)


def test_fp16_states_of_rwkv7_are_refused(tiny_tokenizer: Tokenizer) -> None:
    with pytest.raises(ConfigError, match="states in fp32 alone"):
        choose_executor(random_rwkv7(tiny_tokenizer), "native-fp16-states")
