"""A whole model on the kernels gives what the plain forms give, and torch.compile takes its blocks in one piece."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from nsm_core.config import ModelConfig
from nsm_core.model.nsm import NsmModel
from nsm_core.ops.slot_scan.chunked import CHUNK_LEN

pytest.importorskip("triton", reason="the kernels' compiler is not installed")

CONFIG = ModelConfig(
    d_model=64, num_layers=1, num_heads=2, num_memory_slots=16, write_top_k=4, mlp_hidden=64, vocab_size=128
)
DISPATCHERS = ("nsm_core.ops.routing.route", "nsm_core.ops.short_conv.conv", "nsm_core.ops.slot_scan.dispatch")
TOLERANCE = 1e-4  # relative: fp32 arithmetic through a layer and back


def make_model() -> NsmModel:
    torch.manual_seed(0)
    model = NsmModel(CONFIG)
    for block in model.layers:
        torch.nn.init.normal_(
            block.mixer.get_parameter("out.weight"), std=0.1
        )  # zero at first: nothing would come back
    return model.to("cuda" if torch.cuda.is_available() else "cpu")


def read(model: NsmModel) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Results and gradients over two rows with a document start and padding inside."""
    device = model.embedding.weight.device
    torch.manual_seed(1)
    ids = torch.randint(CONFIG.vocab_size, (2, 2 * CHUNK_LEN), device=device)
    reset = torch.tensor([[True, False], [False, True]], device=device)
    valid = torch.rand(2, 2 * CHUNK_LEN, device=device) < 0.9
    hidden, state = model.read(ids, model.initial_state(2), reset=reset, valid=valid)
    results = {"hidden": hidden} | {name: value for name, value in state.items() if value.is_floating_point()}
    loss = torch.stack([(value * torch.randn_like(value)).mean() for value in results.values()]).sum()
    grads = torch.autograd.grad(loss, list(model.parameters()))
    names = [name for name, _ in model.named_parameters()]
    return {name: value.detach() for name, value in results.items()}, dict(zip(names, grads, strict=True))


def assert_close(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    for name, value in want.items():
        assert (got[name] - value).norm() <= TOLERANCE * value.norm() + 1e-9, name


# NumPy, in which the interpreter computes, says what a GPU does in silence: masked factors may overflow. And the tracer
# looks at the gradient of whatever it meets.
@pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("is_compiled", [False, True], ids=["eager", "traced"])
def test_kernels_and_reference_agree_in_a_model(is_compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in DISPATCHERS:
        monkeypatch.setattr(f"{module}.runs_kernels", lambda _: False)
    want = read(make_model())
    for module in DISPATCHERS:
        monkeypatch.setattr(f"{module}.runs_kernels", lambda _: True)
    model = make_model()
    if is_compiled:
        for block in model.layers:
            block.compile(backend="aot_eager", fullgraph=True, dynamic=False)
    for got, expected in zip(read(model), want, strict=True):
        assert_close(got, expected)
