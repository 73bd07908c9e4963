"""What a worker takes of one call. A client that cannot be seen leaving must give its slot back all the same."""

from __future__ import annotations

import dataclasses

from nsm_core.triton.config import WorkerConfig
from nsm_core.wire.calls import GenerateCall
from nsm_core.wire.tensors import refuse


@dataclasses.dataclass(frozen=True, slots=True)
class CallLimits:
    """Raises InvalidRequest that names the field as the call has it."""

    config: WorkerConfig
    vocab_size: int

    def bounded(self, call: GenerateCall) -> GenerateCall:
        """The call, with the default time-out where it names none."""
        config = self.config
        if call.sampling.max_tokens > config.max_tokens_limit:
            refuse("max_tokens", f"in [1, {config.max_tokens_limit}]", call.sampling.max_tokens)
        if call.timeout_s is None:
            return dataclasses.replace(call, timeout_s=config.default_timeout_s)
        if call.timeout_s > config.max_timeout_s:
            refuse("timeout_s", f"in (0, {config.max_timeout_s:g}]", call.timeout_s)
        return call
