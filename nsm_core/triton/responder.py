"""Where the answers to one request go. One thread sends; any thread may ask `is_cancelled`."""

from __future__ import annotations

import threading
from typing import Any, Protocol

from nsm_core.wire.errors import Failure, encode_failure, triton_code
from nsm_core.wire.tensors import Tensors


class Responder(Protocol):
    """Exactly one last answer is sent: by `send` with `is_last`, by `fail` or by `close`."""

    def send(self, tensors: Tensors, *, is_last: bool) -> None: ...

    def fail(self, failure: Failure) -> None: ...

    def close(self) -> None:
        """There is nothing more to say, or nothing at all."""
        ...

    def is_cancelled(self) -> bool:
        """Whether the client has left; False once the last answer was sent."""
        ...


class TritonResponder:
    """On an InferenceResponseSender. Each call is a round trip through shared memory: a tenth of a millisecond or two.

    `pb_utils`: the module `triton_python_backend_utils`.
    """

    def __init__(self, pb_utils: Any, request: Any) -> None:
        self._pb_utils = pb_utils
        self._sender = request.get_response_sender()
        self._wanted = frozenset(request.requested_output_names())
        # Triton frees what the sender refers to with the last answer: nobody may ask about cancelling then
        self._lock = threading.Lock()
        self._is_over = False

    def send(self, tensors: Tensors, *, is_last: bool) -> None:
        """Only the outputs that the client asked for."""
        make = self._pb_utils.Tensor
        outputs = [make(name, array) for name, array in tensors.items() if name in self._wanted]
        self._send(self._pb_utils.InferenceResponse(output_tensors=outputs), is_last=is_last)

    def fail(self, failure: Failure) -> None:
        errors = self._pb_utils.TritonError
        error = errors(encode_failure(failure), getattr(errors, triton_code(failure.error)))
        self._send(self._pb_utils.InferenceResponse(error=error), is_last=True)

    def close(self) -> None:
        self._send(is_last=True)

    def is_cancelled(self) -> bool:
        with self._lock:
            return not self._is_over and bool(self._sender.is_cancelled())

    def _send(self, *response: Any, is_last: bool) -> None:
        final = self._pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
        with self._lock:
            if self._is_over:  # the last answer failed on its way: there is nobody left to tell
                return
            self._is_over = is_last
            self._sender.send(*response, flags=final if is_last else 0)
