"""An entry is used for what it was stored for, or not at all."""

from __future__ import annotations

import dataclasses
import random

import numpy as np
import pytest

from nsm_core.errors import SnapshotCorrupt
from nsm_core.state.layout import TensorLayout
from nsm_core.state.quantize import StateFormat, rounded_state
from service.stores.prefixes.base import PrefixKey
from service.stores.prefixes.entry import decode_entry, encode_entry
from service.stores.prefixes.keys import PromptDigests
from tests.support.counts import scaled
from tests.support.fakes import FakeBackend, state_after

BACKEND = FakeBackend()
IDS = tuple(range(1, 101))
DIGESTS = PromptDigests(tenant="a", model=BACKEND.model, ids=IDS)
KEY = DIGESTS.key(100)


def encoded(**changes: object) -> bytes:
    fields = {
        "tenant": "a",
        "key": KEY,
        "raw_ids": DIGESTS.raw,
        "state": state_after(IDS),
        "model": BACKEND.model,
        "tokenizer": BACKEND.tokenizer,
        "created_at": 1.0,
    }
    return encode_entry(**{**fields, **changes})  # type: ignore[arg-type]


def decoded(entry: bytes) -> bytes:
    resume = decode_entry(
        entry, tenant="a", key=KEY, raw_ids=DIGESTS.raw, model=BACKEND.model, tokenizer=BACKEND.tokenizer
    )
    assert (resume.position, resume.fingerprint, dict(resume.generated_counts)) == (100, "fake-fingerprint", {})
    return resume.state


def test_an_entry_gives_its_state_back() -> None:
    assert decoded(encoded()) == state_after(IDS)


FLOATS = (TensorLayout("slots", (2, 64), "float32"),)


@pytest.mark.parametrize("form", StateFormat)
def test_an_entry_is_used_whatever_its_writer_rounded_it_to(form: StateFormat) -> None:
    model = dataclasses.replace(BACKEND.model, state_layout=FLOATS)
    state = np.linspace(-1.0, 1.0, 128, dtype="<f4").tobytes()
    entry = encoded(state=state, model=model, state_format=form)
    read = decode_entry(entry, tenant="a", key=KEY, raw_ids=DIGESTS.raw, model=model, tokenizer=BACKEND.tokenizer)
    assert read.state == rounded_state(FLOATS, state, form)
    assert (read.state == state) == (form is StateFormat.FP32)


OTHERS = {
    "tenant": {"tenant": "b"},
    "digest": {"key": dataclasses.replace(KEY, digest="0" * 32)},
    "position": {"key": dataclasses.replace(KEY, position=99)},
    "ids": {"raw_ids": bytes(4) + DIGESTS.raw[4:]},
    "fewer ids": {"raw_ids": DIGESTS.raw[:-4]},
    "model": {"model": dataclasses.replace(BACKEND.model, fingerprint="another")},
    "numerics": {"model": dataclasses.replace(BACKEND.model, numerics="another")},
}


@pytest.mark.parametrize("changes", OTHERS.values(), ids=OTHERS)
def test_R2_an_entry_of_anything_else_is_refused(changes: dict[str, PrefixKey | bytes]) -> None:
    with pytest.raises(SnapshotCorrupt) as caught:
        decoded(encoded(**changes))
    assert "another'" not in str(caught.value)


def test_damage_anywhere_is_refused() -> None:
    entry = encoded()
    for offset in random.Random(1).sample(range(len(entry)), scaled(100, 500)):
        damaged = bytearray(entry)
        damaged[offset] ^= 1 << offset % 8
        with pytest.raises(SnapshotCorrupt):
            decoded(bytes(damaged))
    for length in (0, 3, 4, 403, 404, len(entry) - 1):
        with pytest.raises(SnapshotCorrupt):
            decoded(entry[:length])
