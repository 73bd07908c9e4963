"""What Triton's Python backend loads. The substance is in `nsm_core/triton`, the contract in `nsm_core/wire`."""

from __future__ import annotations

import triton_python_backend_utils as pb_utils

from nsm_core.errors import NsmError
from nsm_core.triton.backend import Backend


class TritonPythonModel:
    """Triton's three calls."""

    def initialize(self, args: dict[str, str]) -> None:
        try:
            self._backend = Backend.load(args, pb_utils)
        except NsmError as error:  # one line for the operator, no traceback
            raise pb_utils.TritonModelException(str(error)) from None

    def execute(self, requests: list[pb_utils.InferenceRequest]) -> None:
        self._backend.execute(requests)

    def finalize(self) -> None:
        self._backend.close()
