"""Each baseline beside the equations of its paper, or a kept implementation where there is one."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from nsm_core.config import ModelConfig
from nsm_core.errors import ConfigError
from nsm_core.model.attention import WindowAttention
from nsm_core.model.nsm import NsmModel
from nsm_core.model.segments import Segments
from nsm_core.model.storage import WeightFormat, read_model, save_model
from nsm_core.tokenizer import Tokenizer
from nsm_lab.baselines.diagonal import S5, DiagonalSsm, S4d
from nsm_lab.baselines.linformer import BLOCK_LEN, BLOCK_ROWS, Linformer
from nsm_lab.baselines.lstm import Lstm
from nsm_lab.baselines.mamba2 import Mamba2
from nsm_lab.baselines.performer import Performer
from nsm_lab.baselines.register import BASELINES
from tests.support.models import small_config

CONFIG = ModelConfig(vocab_size=50, d_model=16, num_layers=1, num_heads=2, num_memory_slots=4, write_top_k=2,
                     mlp_hidden=16, max_context=256)  # fmt: skip


def tokens(num_tokens: int, rows: int = 1, seed: int = 0) -> tuple[Tensor, Segments]:
    x = torch.randn(rows, num_tokens, CONFIG.d_model, generator=torch.Generator().manual_seed(seed))
    return x, Segments(torch.arange(num_tokens).expand(rows, -1))


def test_the_lstm_is_torchs() -> None:
    torch.manual_seed(0)
    mixer, plain = Lstm(CONFIG), torch.nn.LSTM(16, 16, batch_first=True)
    with torch.no_grad():
        mixer.out.weight.copy_(torch.eye(16))
        plain.weight_ih_l0.copy_(mixer.project.weight)
        plain.weight_hh_l0.copy_(mixer.recurrent.weight)
        plain.bias_ih_l0.copy_(mixer.bias)
        plain.bias_hh_l0.zero_()
    x, segments = tokens(40, rows=2)
    out, state = mixer(x, mixer.initial_state(2), segments)
    want, (hidden, cell) = plain(x)
    torch.testing.assert_close((out, state["hidden"], state["cell"]), (want, hidden[0], cell[0]))


def recurrence(mixer: DiagonalSsm, given: Tensor) -> Tensor:
    """x[t] = exp(A step) x[t-1] + (exp(A step) - 1) / A * given[t], one token after the other; complex [B,T,...]."""
    eigenvalue = mixer.eigenvalues(torch.float32)
    decay = (eigenvalue * mixer.log_step.exp().view(-1, *[1] * (eigenvalue.dim() - 1))).exp()
    x, found = torch.zeros_like(given[:, 0]), []
    for t in range(given.shape[1]):
        x = decay * x + (decay - 1.0) / eigenvalue * given[:, t]
        found.append(x)
    return torch.stack(found, dim=1)


@torch.no_grad()
def test_s4d_convolves_like_its_recurrence() -> None:
    torch.manual_seed(0)
    mixer = S4d(CONFIG)
    x, segments = tokens(150)
    read, _ = mixer._ssm(x, mixer.initial_state(1)["modes"], segments)
    modes = recurrence(mixer, x[..., None].expand(-1, -1, -1, 4).to(torch.complex64))
    want = 2.0 * (torch.view_as_complex(mixer.readout) * modes).real.sum(-1)
    torch.testing.assert_close(read, want, rtol=1e-3, atol=1e-3)


@torch.no_grad()
def test_s5_scans_like_its_recurrence() -> None:
    torch.manual_seed(0)
    mixer = S5(CONFIG)
    x, segments = tokens(150)
    read, _ = mixer._ssm(x, mixer.initial_state(1)["modes"], segments)
    modes = recurrence(mixer, torch.complex(*mixer.project(x).chunk(2, dim=-1)))
    torch.testing.assert_close(read, mixer.readout(torch.cat((modes.real, modes.imag), -1)), rtol=1e-3, atol=1e-3)


@torch.no_grad()
def test_performer_comes_closer_to_softmax_attention_with_more_features() -> None:
    errors = []
    for features in (32, 8192):
        torch.manual_seed(0)
        mixer = Performer(dataclasses.replace(CONFIG, num_memory_slots=features // 2, write_top_k=1))
        attention = WindowAttention(dataclasses.replace(CONFIG, num_kv_heads=2), CONFIG.max_context)
        attention.project.weight.copy_(mixer.project.weight)
        for each in (mixer, attention):
            each.out.weight.copy_(torch.eye(16))
        x, segments = tokens(60)
        read, want = (each(x, each.initial_state(1), segments)[0] for each in (mixer, attention))
        errors.append(float((read - want).norm() / want.norm()))
    assert errors[1] < 0.25 < 2.0 * errors[1] < errors[0]


@torch.no_grad()
def test_performers_state_does_not_grow_with_the_text() -> None:
    mixer = Performer(CONFIG)
    state, largest = mixer.initial_state(1), []
    for start in range(0, 6400, 64):
        x, _ = tokens(64, seed=start)
        _, state = mixer(x, state, Segments(torch.arange(start, start + 64)[None]))
        largest.append(float(state["means"].abs().max()))
    assert largest[-1] < 2.0 * largest[5]


@torch.no_grad()
def test_linformer_reads_completed_blocks_by_their_projections() -> None:
    """The last token of three blocks, by hand: its own block token by token, the two before as 16 rows each."""
    torch.manual_seed(0)
    mixer = Linformer(CONFIG)
    mixer.out.weight.copy_(torch.eye(16))
    x, segments = tokens(3 * BLOCK_LEN)
    read, _ = mixer(x, mixer.initial_state(1), segments)
    q, kv = mixer._heads(mixer.project(x), segments)
    blocks = torch.unflatten(kv[0], 0, (3, BLOCK_LEN))
    keys, values = blocks.chunk(2, dim=-1)
    short_keys, short_values = (
        torch.einsum("rc,nchk->nrhk", weight, part) for weight, part in zip(mixer.compress, (keys, values), strict=True)
    )
    seen_keys = torch.cat((keys[2], short_keys[:2].flatten(0, 1)))
    seen_values = torch.cat((values[2], short_values[:2].flatten(0, 1)))
    assert len(seen_keys) == BLOCK_LEN + 2 * BLOCK_ROWS
    weights = torch.einsum("hk,shk->hs", q[0, -1], seen_keys).softmax(-1)
    torch.testing.assert_close(read[0, -1], torch.einsum("hs,shk->hk", weights, seen_values).flatten())


def test_mamba2_is_that_of_the_transformers_library() -> None:
    """The library comes with the developers' packages."""
    transformers = pytest.importorskip("transformers", reason="needs the transformers library")
    torch.manual_seed(0)
    mixer = Mamba2(CONFIG)
    config = transformers.Mamba2Config(
        num_heads=4, head_dim=8, vocab_size=50, hidden_size=16, state_size=4, num_hidden_layers=1, expand=2, n_groups=1,
        conv_kernel=CONFIG.conv_taps, chunk_size=64, layer_norm_epsilon=CONFIG.norm_eps,
    )  # fmt: skip
    other = transformers.Mamba2Model(config).layers[0].mixer
    with torch.no_grad():
        torch.nn.init.normal_(mixer.out.weight)
        channels = mixer.conv_weight.shape[1]
        other.in_proj.weight.copy_(mixer.project.weight)
        other.conv1d.weight.copy_(mixer.conv_weight.T.reshape(channels, 1, -1))
        other.conv1d.bias.copy_(mixer.conv_bias)
        other.dt_bias.copy_(mixer.step_bias)
        other.A_log.copy_(mixer.log_decay)
        other.D.copy_(mixer.skip)
        other.norm.weight.copy_(mixer.out_norm)
        other.out_proj.weight.copy_(mixer.out.weight)
        x, segments = tokens(130, rows=2)
        torch.testing.assert_close(mixer(x, mixer.initial_state(2), segments)[0], other(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", BASELINES)
def test_a_stored_baseline_reads_as_before(kind: str, tiny_tokenizer: Tokenizer, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = NsmModel(small_config(tiny_tokenizer.vocab_size, layer_pattern=kind)).eval().requires_grad_(False)
    for block in model.layers:
        torch.nn.init.normal_(block.mixer.out.weight, std=0.1)
    save_model(model, tiny_tokenizer, tmp_path, WeightFormat.FP32)
    stored, _, _ = read_model(tmp_path)
    ids = torch.arange(70)[None]
    want, got = (each(ids, each.initial_state(1)) for each in (model, stored))
    torch.testing.assert_close(got, want, rtol=0.0, atol=0.0)


@pytest.mark.parametrize("kind", BASELINES)
def test_every_weight_of_a_baseline_learns(kind: str) -> None:
    """A gradient for all of them, with a text that starts within the row and padding before it."""
    torch.manual_seed(0)
    model = NsmModel(dataclasses.replace(CONFIG, layer_pattern=kind))
    for matrix in (weight for weight in model.layers[0].mixer.parameters() if not weight.any()):
        torch.nn.init.normal_(matrix)  # zero at the start, it hides what is before it
    ids = torch.randint(50, (2, 2 * BLOCK_LEN + 64))
    valid = torch.ones_like(ids, dtype=torch.bool)
    valid[:, 2 * BLOCK_LEN - 5 : 2 * BLOCK_LEN] = False
    reset = torch.tensor([[True, False, False], [False, False, True]])
    hidden, _ = model.read(ids, model.initial_state(2), valid=valid, reset=reset)
    F.cross_entropy(model.logits(hidden).flatten(0, 1), ids.flatten()).backward()
    for name, weight in model.layers[0].mixer.named_parameters():
        assert weight.grad is not None, name
        assert weight.grad.isfinite().all(), name
        assert weight.grad.abs().sum() > 0, name


def test_what_baselines_need_of_a_config_is_said() -> None:
    with pytest.raises(ConfigError, match="d_model must be even for S5, got 15"):
        NsmModel(ModelConfig(layer_pattern="s", d_model=15, num_heads=3))
    with pytest.raises(ConfigError, match="d_model / num_heads must be even for attention, got 5"):
        NsmModel(ModelConfig(layer_pattern="p", d_model=15, num_heads=3))
