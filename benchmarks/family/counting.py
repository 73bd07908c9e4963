"""Operations of a model, counted while it runs: never derived from its parameters.

Products are counted by `torch.utils.flop_counter`. It knows neither recurrent kernels nor triangular systems; the two
formulas below add them from the shapes that the operators are given. It counts nothing but products: `PointwiseCounter`
counts the rest, one operation for each number of an elementwise result or of a reduction's input. Counting runs on
a CPU in fp32, where our layers are plain PyTorch, so that no kernel hides what it does.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.family.models import VOCABULARY, Size, build

aten = torch.ops.aten
REDUCTIONS = {
    "sum", "mean", "cumsum", "cumprod", "amax", "max", "topk", "sort", "_softmax", "_log_softmax", "native_layer_norm",
    "_fused_rms_norm", "linalg_vector_norm", "logsumexp",
}  # fmt: skip


def solve_flops(matrix: torch.Size, given: torch.Size, *_: Any, **__: Any) -> int:
    """A triangular system of n unknowns with m columns: n^2 m operations, for each of the batch."""
    return math.prod(given) * int(matrix[-1])


def lstm_flops(x: torch.Size, w_in: torch.Size, w_hidden: torch.Size, *_: Any, **__: Any) -> int:
    """oneDNN's LSTM layer: both products of every token; x [T,B,D], the weights [4d,D] and [4d,d]."""
    return 2 * int(x[0]) * int(x[1]) * (math.prod(w_in) + math.prod(w_hidden))


def lstm_backward_flops(x: torch.Size, w_in: torch.Size, w_hidden: torch.Size, *rest: Any, **named: Any) -> int:
    """Its backward pass: a gradient for the input and one for the weight of every product."""
    return 2 * lstm_flops(x, w_in, w_hidden, *rest, **named)


FORMULAS: dict[Any, Callable[..., int]] = {
    aten.linalg_solve_triangular: solve_flops,
    aten.mkldnn_rnn_layer: lstm_flops,
    aten.mkldnn_rnn_layer_backward: lstm_backward_flops,
}


class PointwiseCounter(TorchDispatchMode):
    """What is not a product: elementwise results and the inputs of reductions, in numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if torch.Tag.pointwise in func.tags and isinstance(out, Tensor):
            self.total += out.numel()
        elif func._overloadpacket.__name__ in REDUCTIONS:
            self.total += args[0].numel()
        return out


def counted(work: Callable[[], object]) -> dict[str, int]:
    """flops (a multiply-add is two) and other operations of `work`."""
    products = FlopCounterMode(display=False, custom_mapping=FORMULAS)
    others = PointwiseCounter()
    with products, others:
        work()
    return {"flops": products.get_total_flops(), "other": others.total}


def count_model(name: str, size: Size) -> dict[str, Any]:
    """One row of `train_len` tokens forward, and forward with backward; one token of decoding on top of it."""
    cpu, num_tokens = torch.device("cpu"), size.train_len
    model = build(name, size, num_tokens, cpu)
    ids = torch.randint(VOCABULARY, (1, num_tokens), generator=torch.Generator().manual_seed(0))

    def forward() -> Tensor:
        hidden, _ = model.read(ids, model.initial_state(1), is_fresh=True)
        return F.cross_entropy(model.logits(hidden).flatten(0, 1), ids.flatten())

    with torch.no_grad():
        ahead = counted(forward)
        _, state = model.read(ids, model.initial_state(1))
        step = counted(lambda: model.logits(model.step(ids[:, 0], state)[0]))
    both = counted(lambda: forward().backward())
    return {
        "tokens": num_tokens,
        "forward_flops": ahead["flops"],
        "forward_other": ahead["other"],
        "training_flops": both["flops"],
        "training_other": both["other"],
        "decode_flops": step["flops"],
        "decode_other": step["other"],
    }


class LiveBytes(TorchDispatchMode):
    """The largest number of bytes in tensors that were made inside and were alive at once."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = self._now = 0
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {self._key(x) for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        for made in tree_leaves(out):
            if isinstance(made, Tensor) and self._key(made) not in given:
                self._add(made)
        return out

    @staticmethod
    def _key(x: Tensor) -> int:
        return int(x.untyped_storage()._cdata)

    def _add(self, made: Tensor) -> None:
        storage, key = made.untyped_storage(), self._key(made)
        self._now += storage.nbytes() - self._alive.get(key, (None, 0))[1]
        self._alive[key] = (StorageWeakRef(storage), storage.nbytes())
        if self._now > self.peak:  # if what has ended is left out as well
            self._alive = {key: entry for key, entry in self._alive.items() if not entry[0].expired()}
            self._now = sum(num_bytes for _, num_bytes in self._alive.values())
            self.peak = max(self.peak, self._now)
