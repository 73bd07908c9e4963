"""Every kind of model learns one batch of Tiny Shakespeare by heart."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.nsm_lab.evaluation.tasks.learning import fit, tiny_model
from tests.support.samples import shakespeare_text

SOFTMAX = {"router": "softmax", "write_top_k": 4}
FAMILIES: dict[str, dict[str, object]] = {
    "simple": SOFTMAX,
    "pulse": {},
    "nsm, gru": {**SOFTMAX, "layer_pattern": "G", "gate_chunk": 16},
    "nsm, lstm": {**SOFTMAX, "layer_pattern": "G", "gate": "lstm", "gate_chunk": 32},
    "nsm, free": {**SOFTMAX, "layer_pattern": "G", "gate": "free", "gate_chunk": 32},
    "hybrid": {"layer_pattern": "NW", "num_layers": 2},
    "advanced hybrid": {**SOFTMAX, "layer_pattern": "[CW]", "timescale_groups": 4, "communication_interval": 64},
    "sequential hybrid": {**SOFTMAX, "layer_pattern": "(WNL)"},
    "memory augmented": {**SOFTMAX, "layer_pattern": "(NM)", "memory_rows": 16, "memory_width": 16, "gate_chunk": 16},
    "two levels": {"layer_pattern": "C", "upper_slots": 4, "communication_interval": 64},
    "direct read": {"projector": "direct"},
    "hybrid read": {"projector": "hybrid"},
    "allocating": {**SOFTMAX, "allocation": True, "start_slots": 8, "communication_interval": 64},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_learns_a_batch_by_heart(family: str) -> None:
    text = shakespeare_text()[:194]
    alphabet = sorted(set(text))
    ids = torch.tensor([alphabet.index(character) for character in text])
    rows = torch.stack((ids[:96], ids[97:193]))
    targets = torch.stack((ids[1:97], ids[98:194]))
    model = tiny_model(len(alphabet), **FAMILIES[family])

    def loss() -> torch.Tensor:
        hidden, _ = model(rows, model.initial_state(2))
        return F.cross_entropy(model.logits(hidden).flatten(0, 1), targets.flatten())

    fit(model, loss, steps=30, lr=3e-2)
    with torch.no_grad():
        assert loss() < 0.5  # of about 3 in letters drawn by their frequency
