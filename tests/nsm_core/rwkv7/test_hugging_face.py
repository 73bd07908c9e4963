"""The plain model against the package `rwkv7-hf`, which converts an official file and computes it by itself in fp32."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from nsm_core.rwkv7.model import CHANNEL_SHIFT, MATRIX, TIME_SHIFT, Rwkv7Model
from nsm_core.rwkv7.opening import open_files
from tests.support.counts import scaled
from tests.support.model_files import write_pth
from tests.support.rwkv7 import small_config
from tests.support.rwkv7_files import model_tensors, with_vocabulary

pytestmark = pytest.mark.timeout(1800)
TOLERANCE = 1e-4
NUM_TOKENS = scaled(500, 2000)
SIZES = {
    "small": {"width": 128, "num_layers": 3, "hidden": 512, "value_rank": 8},
    "medium": {"width": 256, "num_layers": 4, "hidden": 1024, "decay_rank": 64, "gate_rank": 128},
    "large": {"width": 768, "num_layers": 6, "hidden": 3072, "decay_rank": 64, "gate_rank": 128},
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("size", SIZES)
def test_logits_and_states_agree_with_the_package(tmp_path: Path, size: str) -> None:
    converter = pytest.importorskip("rwkv7_hf.converter")
    modeling = pytest.importorskip("rwkv7_hf.modeling_rwkv7")
    config = small_config(vocab_size=640, head_size=64, **SIZES[size])
    path, out = with_vocabulary(write_pth(tmp_path / "model.pth", model_tensors(config))), tmp_path / "hf"
    converter.main(["--input", str(path), "--output", str(out), "--precision", "fp32"])
    own = open_files(with_vocabulary(out))
    model = Rwkv7Model(own.config, own.tensors)
    ids = torch.randint(config.vocab_size, (1, NUM_TOKENS), generator=torch.Generator().manual_seed(3))
    with torch.inference_mode():
        theirs = modeling.RWKV7ForCausalLM.from_pretrained(out).float().eval()(input_ids=ids, use_cache=True)
        hidden, state = model.forward(ids, model.initial_state(1))
        assert float((model.logits(hidden) - theirs.logits).abs().max()) < TOLERANCE
    for layer, parts in enumerate(theirs.past_key_values.states):
        for name, part in ((MATRIX, "recurrent_state"), (TIME_SHIFT, "attention_shift"), (CHANNEL_SHIFT, "ffn_shift")):
            got, want = state[f"layers.{layer}.{name}"], parts[part].float()
            assert float((got.reshape(want.shape) - want).abs().max()) < TOLERANCE, (layer, name)
