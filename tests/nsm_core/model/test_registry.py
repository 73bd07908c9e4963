"""Layers of other packages."""

from __future__ import annotations

import pytest

from nsm_core.errors import ConfigError
from nsm_core.model import registry
from nsm_core.model.nsm import NsmModel
from nsm_core.model.recurrence import LinearRecurrence
from nsm_core.model.registry import register_layer
from tests.support.models import small_config


@pytest.fixture(autouse=True)
def own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Empty for each test, whatever others registered."""
    monkeypatch.setattr(registry, "_registered", {})


def test_a_registered_layer_is_built_like_any_other() -> None:
    register_layer("q", LinearRecurrence)
    register_layer("q", LinearRecurrence)
    mixers = [block.mixer for block in NsmModel(small_config(50, layer_pattern="qN")).layers]
    assert isinstance(mixers[0], LinearRecurrence)


def test_a_layer_that_is_not_registered_is_refused_with_its_letter_and_the_extra() -> None:
    with pytest.raises(ConfigError, match=r"layer_pattern 'Nq' has the layer 'q', .*pip install 'nsm-serve\[lab\]'"):
        NsmModel(small_config(50, layer_pattern="Nq"))


@pytest.mark.parametrize("letter", ["", "Q", "qq", "1", "é"])
def test_letters_of_the_core_and_other_signs_cannot_be_registered(letter: str) -> None:
    with pytest.raises(ValueError, match="one letter from a to z"):
        register_layer(letter, LinearRecurrence)


def test_a_letter_has_one_factory() -> None:
    register_layer("q", LinearRecurrence)
    with pytest.raises(ValueError, match="registered with another factory"):
        register_layer("q", lambda config: LinearRecurrence(config))
