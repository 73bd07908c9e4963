"""The slot recurrence over chunks of tokens: matmuls and element-wise work, no loop over tokens.

Derivation in benchmarks/notes/forms.md. Within a chunk, `exp(G_i - G_j)` depends on three indices and is factored as
`exp(G_i - ref) * exp(ref - G_j)`. With log decays clamped at LOG_DECAY_MIN and sub-blocks of SUB_BLOCK tokens around a
reference in their middle, both factors stay inside the range of fp32 and bf16 (fp16 overflows here).
"""

from __future__ import annotations

import dataclasses

import torch
import torch.nn.functional as F
from torch import Tensor

from nsm_core.ops.slot_scan.inputs import ScanInputs

CHUNK_LEN = 64
SUB_BLOCK = 32
LOG_DECAY_MIN = -5.0  # (SUB_BLOCK / 2) * 5 = 80 < 88, the exponent range of fp32 and bf16


def _chunk_len_for(num_tokens: int) -> int:
    """Short prompts have short chunks: padding to 64 would be wasted work."""
    for length in (16, 32):
        if num_tokens <= length:
            return length
    return CHUNK_LEN


def _to_chunks(x: Tensor, chunk_len: int) -> Tensor:
    """[B,T,H,D] -> [B,H,N,C,D]; T is padded with zeros, which neither decay nor write."""
    batch, num_tokens, heads, width = x.shape
    padded = F.pad(x, (0, 0, 0, 0, 0, -num_tokens % chunk_len))
    return padded.view(batch, -1, chunk_len, heads, width).permute(0, 3, 1, 2, 4)


def _chunk_states(
    update: Tensor, decay: Tensor, state: Tensor, reset: Tensor | None, initial: Tensor | None
) -> tuple[Tensor, Tensor]:
    """State at the start of every chunk [B,H,N,M,2K] and after the last one; update [B,H,N,M,2K], decay [B,H,N,M]."""
    starts = []
    for n in range(update.shape[2]):
        if reset is not None and initial is not None:
            state = torch.where(reset[:, n, None, None, None], initial.to(state.dtype), state)
        starts.append(state)
        state = decay[:, :, n, :, None] * state + update[:, :, n]
    return torch.stack(starts, dim=2), state


class _Chunk:
    """Decay factors of all chunks, in sub-blocks: shapes [B,H,N,nb,c,M]."""

    def __init__(self, cumulative: Tensor, write: Tensor, sub_block: int) -> None:
        blocks = (*cumulative.shape[:3], -1, sub_block, cumulative.shape[-1])
        self.sub_block = sub_block
        self.cumulative, self.write = cumulative, write
        self.blocks = cumulative.reshape(blocks)
        middle = self.blocks[..., sub_block // 2 - 1 : sub_block // 2, :]
        self.left = (self.blocks - middle).exp()
        self.right = (middle - self.blocks).exp() * write.reshape(blocks)
        self.num_blocks = self.blocks.shape[3]

    def split(self, x: Tensor) -> Tensor:
        """[B,H,N,C,D] -> [B,H,N,nb,c,D]."""
        return x.reshape(*x.shape[:3], self.num_blocks, self.sub_block, x.shape[-1])

    def earlier(self, block: int) -> tuple[Tensor, Tensor, slice]:
        """Factors of sub-block `block` against all tokens before it in its chunk; every exponent is <= 0."""
        past = slice(0, block * self.sub_block)
        ref = self.blocks[..., block - 1, -1:, :]
        left = (self.blocks[..., block, :, :] - ref).exp()
        right = (ref - self.cumulative[..., past, :]).exp() * self.write[..., past, :]
        return left, right, past


def _read_logits(q: Tensor, k: Tensor, keys: Tensor, decay_from_start: Tensor, chunk: _Chunk, causal: Tensor) -> Tensor:
    """q_i . S^K_i for every token and slot: [B,H,N,C,M]."""
    from_start = decay_from_start * (q @ keys.transpose(-1, -2))
    q_blocks, k_blocks = chunk.split(q), chunk.split(k)
    scores = (q_blocks @ k_blocks.transpose(-1, -2)).masked_fill(~causal, 0.0)
    inside = [*(chunk.left * (scores @ chunk.right)).unbind(3)]
    for block in range(1, chunk.num_blocks):
        left, right, past = chunk.earlier(block)
        past_scores = q_blocks[..., block, :, :] @ k[..., past, :].transpose(-1, -2)
        inside[block] = inside[block] + left * (past_scores @ right)
    return from_start + torch.cat(inside, dim=-2)


def _read_values(
    read: Tensor, v: Tensor, values: Tensor, decay_from_start: Tensor, chunk: _Chunk, causal: Tensor
) -> Tensor:
    """sum_m read_i[m] S^V_i[m] for every token: [B,H,N,C,K]."""
    from_start = (read * decay_from_start) @ values
    read_blocks, v_blocks = chunk.split(read), chunk.split(v)
    mixing = (read_blocks * chunk.left) @ chunk.right.transpose(-1, -2)
    # where, not a product with the mask: a masked entry may be inf, and inf * 0 is NaN
    inside = [*(torch.where(causal, mixing, 0.0) @ v_blocks).unbind(3)]
    for block in range(1, chunk.num_blocks):
        left, right, past = chunk.earlier(block)
        past_mixing = (read_blocks[..., block, :, :] * left) @ right.transpose(-1, -2)
        inside[block] = inside[block] + past_mixing @ v[..., past, :]
    return from_start + torch.cat(inside, dim=-2)


def _read_weights(scaled: Tensor | None, read_bias: Tensor | None, active: Tensor | None) -> Tensor:
    """Softmax over the slots of `scaled` plus `read_bias` [B,H,N,C,M]; at least one is given."""
    given = [term for term in (scaled, read_bias) if term is not None]
    logits = given[0] if len(given) == 1 else given[0] + given[1]
    if active is not None:
        logits = logits.masked_fill(~active.unsqueeze(-2).unsqueeze(-2), -torch.inf)
    return torch.softmax(logits, dim=-1)


def slot_scan_chunked(inputs: ScanInputs) -> tuple[Tensor, Tensor]:
    """Same result as `slot_scan_reference`; T must be a multiple of CHUNK_LEN if `reset` is given."""
    if inputs.cu_seqlens is not None:
        return _scan_sequences(inputs, inputs.cu_seqlens)
    out, state, _ = _scan_chunks(inputs)
    return out, state


def slot_scan_with_reads(inputs: ScanInputs) -> tuple[Tensor, Tensor, Tensor]:
    """`slot_scan_chunked` without `cu_seqlens`, and the read weights of every token, [B,T,H,M]."""
    out, state, read = _scan_chunks(inputs)
    return out, state, read.permute(0, 2, 3, 1, 4).flatten(1, 2)[:, : out.shape[1]]


def _in_one_type(inputs: ScanInputs) -> ScanInputs:
    """q, k and v in the type of the decays: matrices come in bf16 where kernels of other sizes compute in it. Autocast
    does that by itself."""
    if torch.is_autocast_enabled(inputs.v.device.type):
        return inputs
    tokens = {name: value.to(inputs.log_decay.dtype) for name, value in inputs.tokens.items()}
    return dataclasses.replace(inputs, **tokens)


def _scan_chunks(inputs: ScanInputs) -> tuple[Tensor, Tensor, Tensor]:
    """The reads [B,T,H,K], the state after the last token, and the read weights [B,H,N,C,M]."""
    inputs = _in_one_type(inputs)
    v, log_decay, read_bias, active = inputs.v, inputs.log_decay, inputs.read_bias, inputs.active
    num_tokens, head_dim = v.shape[1], v.shape[-1]
    chunk_len = CHUNK_LEN if inputs.reset is not None else _chunk_len_for(num_tokens)
    if active is not None:
        log_decay = torch.where(active.unsqueeze(-3), log_decay, 0.0)
    if read_bias is not None:
        read_bias = _to_chunks(read_bias, chunk_len)
    v, log_decay = _to_chunks(v, chunk_len), _to_chunks(log_decay, chunk_len)
    keyed = None
    if inputs.q is not None and inputs.k is not None:
        keyed = _to_chunks(inputs.q, chunk_len), _to_chunks(inputs.k, chunk_len)
    sub_block = min(SUB_BLOCK, chunk_len)

    write = -torch.expm1(log_decay)
    cumulative = log_decay.cumsum(dim=3)
    total = cumulative[..., -1, :]
    chunk = _Chunk(cumulative, write, sub_block)
    causal = torch.ones(sub_block, sub_block, dtype=torch.bool, device=v.device).tril()

    to_end = (write * (total[..., None, :] - cumulative).exp()).transpose(-1, -2)
    pairs = v if keyed is None else torch.cat((keyed[1], v), dim=-1)
    update = (to_end @ pairs).to(inputs.state.dtype)
    starts, state = _chunk_states(update, total.exp(), inputs.state, inputs.reset, inputs.initial)
    *keys, values = torch.split(starts, head_dim, dim=-1)  # keys: none without a bank of them

    decay_from_start = cumulative.exp()
    scaled = None
    if keyed is not None:
        logits = _read_logits(*keyed, keys[0], decay_from_start, chunk, causal)
        scaled = inputs.scale[:, None, None, None] * logits.to(state.dtype)
    read = _read_weights(scaled, None if read_bias is None else read_bias.to(state.dtype), active)
    out = _read_values(read, v, values, decay_from_start, chunk, causal)
    return out.permute(0, 2, 3, 1, 4).flatten(1, 2)[:, :num_tokens], state, read


def _scan_sequences(inputs: ScanInputs, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    """Sequences end to end, as right-padded rows: padding neither decays nor writes."""
    lengths = cu_seqlens.diff()
    longest = int(lengths.max())
    offset = torch.arange(longest, device=lengths.device)
    is_token = offset < lengths[:, None]
    index = torch.where(is_token, cu_seqlens[:-1, None] + offset, 0)
    rows = {name: torch.where(is_token[..., None, None], x[0, index], 0.0) for name, x in inputs.tokens.items()}
    out, state = slot_scan_chunked(dataclasses.replace(inputs, **rows, cu_seqlens=None))
    return out[is_token][None], state
