"""Attention of a prompt's tokens over a window, for inference: keys are read in one order, whatever is read with them.

A program makes QUERIES outputs of one head. It goes through the keys KEYS at a time, from the oldest on; what a query
may not see changes nothing, to the bit. So a token's output depends neither on other rows, nor on padding, nor on where
its prompt was cut, as long as it was cut at multiples of KEYS.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

QUERIES, KEYS = 64, 64


@triton.jit
def _attend(
    q_ptr,
    kv_ptr,
    mask_ptr,
    out_ptr,
    q_batch,
    q_token,
    kv_batch,
    kv_head,
    kv_part,
    kv_token,
    mask_batch,
    num_queries,
    num_keys,
    H: tl.constexpr,
    GROUP: tl.constexpr,
    K: tl.constexpr,
    CHANNELS: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    head, batch = tl.program_id(1), tl.program_id(2).to(tl.int64)
    queries = tl.program_id(0) * QUERIES + tl.arange(0, QUERIES)
    channels = tl.arange(0, CHANNELS)
    is_query, is_channel = queries < num_queries, channels < K
    at = queries[:, None].to(tl.int64) * q_token + head * K + channels[None, :]
    q = tl.load(q_ptr + batch * q_batch + at, mask=is_query[:, None] & is_channel[None, :], other=0.0)
    kv_ptr += batch * kv_batch + head // GROUP * kv_head
    mask_ptr += batch * mask_batch
    top = tl.full([QUERIES], -1e30, tl.float32)  # finite: a difference of two infinities is no number
    total = tl.zeros([QUERIES], tl.float32)
    read = tl.zeros([QUERIES, CHANNELS], tl.float32)
    for start in range(0, num_keys, KEYS):
        keys = start + tl.arange(0, KEYS)
        is_key = keys < num_keys
        pairs = queries[:, None].to(tl.int64) * num_keys + keys[None, :]
        is_seen = tl.load(mask_ptr + pairs, mask=is_query[:, None] & is_key[None, :], other=0) != 0
        if tl.max(tl.max(is_seen.to(tl.int32), axis=1), axis=0) > 0:
            token = keys[:, None].to(tl.int64) * kv_token + channels[None, :]
            is_value = is_key[:, None] & is_channel[None, :]
            k = tl.load(kv_ptr + token, mask=is_value, other=0.0)
            scores = tl.where(is_seen, tl.dot(q, tl.trans(k), input_precision=PRECISION), -float("inf"))
            new_top = tl.maximum(top, tl.max(scores, axis=1))
            weights = tl.exp(scores - new_top[:, None])
            rescale = tl.exp(top - new_top)
            v = tl.load(kv_ptr + kv_part + token, mask=is_value, other=0.0)
            read = read * rescale[:, None] + tl.dot(weights.to(v.dtype), v, input_precision=PRECISION)
            total = total * rescale + tl.sum(weights, axis=1)
            top = new_top
    to = ((batch * num_queries + queries[:, None]) * H + head) * K + channels[None, :]
    out = (read / tl.where(is_query, total, 1.0)[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + to, out, mask=is_query[:, None] & is_channel[None, :])


def attend_in_order(q: Tensor, kv: Tensor, mask: Tensor | None) -> Tensor:
    """q [B,T,H,K], kv [B,Hkv,2,S,K], mask [B or 1, T, S] bool -> [B,T,H K]. None: causal, T = S."""
    batch, num_queries, heads, head_dim = q.shape
    num_keys = kv.shape[3]
    if mask is None:
        mask = torch.ones(1, num_queries, num_keys, dtype=torch.bool, device=q.device).tril()
    q, kv, mask = q.contiguous(), kv.contiguous(), mask.contiguous()
    out = torch.empty_like(q)
    grid = (triton.cdiv(num_queries, QUERIES), heads, batch)
    with torch.cuda.device_of(q):
        _attend[grid](
            q,
            kv,
            mask.view(torch.uint8),
            out,
            q.stride(0),
            q.stride(1),
            *kv.stride()[:4],
            0 if mask.shape[0] == 1 else mask.stride(0),
            num_queries,
            num_keys,
            H=heads,
            GROUP=heads // kv.shape[1],
            K=head_dim,
            CHANNELS=max(16, triton.next_power_of_2(head_dim)),
            QUERIES=QUERIES,
            KEYS=KEYS,
            PRECISION="tf32x3" if q.dtype == torch.float32 else "ieee",
            num_warps=4,
            num_stages=2,
        )
    return out.flatten(2)
