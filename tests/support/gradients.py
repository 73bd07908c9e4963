"""A check of models that are trained."""

from __future__ import annotations

import torch

from nsm_core.model.nsm import NsmModel


def require_every_gradient(model: NsmModel) -> None:
    """Each weight of a model of one layer gets a finite gradient that is not 0, once its outputs are not 0."""
    torch.nn.init.normal_(model.layers[0].mixer.out.weight, std=0.2)
    torch.nn.init.normal_(model.layers[0].mlp.down.weight, std=0.2)
    hidden, _ = model(torch.randint(model.config.vocab_size, (2, 30)), model.initial_state(2))
    model.logits(hidden).logsumexp(-1).sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.any(), name
