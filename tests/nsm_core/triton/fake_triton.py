"""The parts of `triton_python_backend_utils` that the backend uses, in memory, and workers on a small model."""

from __future__ import annotations

import dataclasses
import json
import threading
from collections.abc import Mapping
from typing import Any

import numpy as np

from nsm_core.config import EngineLimits
from nsm_core.tokenizer import Tokenizer
from nsm_core.triton.config import WorkerConfig
from nsm_core.triton.worker import Worker
from nsm_core.wire.errors import Failure
from nsm_core.wire.tensors import OUTPUTS, Tensors
from tests.nsm_core.engine.harness import FINGERPRINT, small_model
from tests.support.models import as_loaded

WAIT_S = 60.0


def make_worker(tokenizer: Tokenizer, **config: Any) -> Worker:
    """Not started. Two rows, three places in the queue, room for a few kept states."""
    defaults = {"max_slots": 2, "token_budget": 32, "queue_limit": 3, "kept_states_mb": 1, "drain_s": 0.0}
    return Worker(as_loaded(small_model(), tokenizer, fingerprint=FINGERPRINT), worker_config(**{**defaults, **config}))


def worker_config(**fields: Any) -> WorkerConfig:
    """Those of the engine among the others, as in `config.pbtxt`."""
    engine = {field.name: fields.pop(field.name) for field in dataclasses.fields(EngineLimits) if field.name in fields}
    return WorkerConfig(engine=EngineLimits(**engine), **fields)


class FakeResponder:
    """Remembers what was sent; `is_left` says that the client is gone."""

    def __init__(self) -> None:
        self.answers: list[Tensors] = []
        self.failure: Failure | None = None
        self.num_last = 0
        self.is_left = False
        self.num_asked = 0
        self.has_answers = threading.Event()
        self._is_over = threading.Event()

    def send(self, tensors: Tensors, *, is_last: bool) -> None:
        self.answers.append(tensors)
        self.has_answers.set()
        self._end(is_last)

    def fail(self, failure: Failure) -> None:
        self.failure = failure
        self._end(True)

    def close(self) -> None:
        self._end(True)

    def is_cancelled(self) -> bool:
        self.num_asked += 1
        return self.is_left and not self.num_last

    def wait(self) -> FakeResponder:
        """Until the last answer."""
        assert self._is_over.wait(WAIT_S)
        return self

    @property
    def ids(self) -> list[int]:
        empty = np.array([], dtype=np.int32)
        return [token_id for tensors in self.answers for token_id in tensors.get("token_ids", empty).tolist()]

    @property
    def details(self) -> dict[str, Any]:
        details: dict[str, Any] = json.loads(self.answers[-1]["details"][0])
        return details

    def _end(self, is_last: bool) -> None:
        self.num_last += is_last
        if is_last:
            self._is_over.set()


@dataclasses.dataclass
class _Tensor:
    label: str
    array: np.ndarray[Any, Any]

    def name(self) -> str:
        return self.label

    def as_numpy(self) -> np.ndarray[Any, Any]:
        return self.array


@dataclasses.dataclass
class _Error:
    message: str
    code: int


@dataclasses.dataclass
class _Response:
    output_tensors: list[_Tensor] = dataclasses.field(default_factory=list)
    error: _Error | None = None


class _Metric:
    def __init__(self) -> None:
        self.value = 0.0
        self.num_writes = 0
        self.is_written = threading.Event()
        self._changed = threading.Condition()

    def set(self, value: float) -> None:
        with self._changed:
            self.value = value
            self.num_writes += 1
            self._changed.notify_all()
        self.is_written.set()

    def reaches(self, value: float) -> bool:
        """Waits for it."""
        with self._changed:
            return self._changed.wait_for(lambda: self.value == value, WAIT_S)

    def increment(self, value: float) -> None:
        assert value > 0
        self.set(self.value + value)


class FakeTriton:
    """The module. `metrics` by name."""

    TRITONSERVER_RESPONSE_COMPLETE_FINAL = 1
    Tensor = _Tensor
    InferenceResponse = _Response

    class TritonError(_Error):
        INTERNAL, INVALID_ARG, NOT_FOUND, UNAVAILABLE, CANCELLED = range(5)

    def __init__(self) -> None:
        self.metrics: dict[str, _Metric] = {}
        triton = self

        class MetricFamily:
            GAUGE, COUNTER = "gauge", "counter"

            def __init__(self, *, name: str, description: str, kind: str) -> None:
                assert description
                assert kind == ("counter" if name.endswith(("_total", "_bucket", "_count", "_sum")) else "gauge")
                self._name = name

            def Metric(self, *, labels: Mapping[str, str]) -> _Metric:
                assert labels
                more = "".join(value for name, value in labels.items() if name in ("outcome", "le"))
                return triton.metrics.setdefault(f"{self._name} {more}".strip(), _Metric())

        self.MetricFamily = MetricFamily


class FakeSender:
    """An InferenceResponseSender. `error`: what the next send raises."""

    def __init__(self) -> None:
        self.responses: list[_Response] = []
        self.num_finals = 0
        self.is_left = False
        self.error: Exception | None = None
        self.has_responses = threading.Event()
        self.is_over = threading.Event()
        self._changed = threading.Condition()

    def send(self, response: _Response | None = None, *, flags: int) -> None:
        assert not self.num_finals, "nothing may be sent after the last answer"
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        if response is not None:
            with self._changed:
                self.responses.append(response)
                self._changed.notify_all()
        self.has_responses.set()
        self.num_finals += flags
        if flags:
            self.is_over.set()

    def is_cancelled(self) -> bool:
        assert not self.num_finals, "Triton has freed what this refers to"
        return self.is_left

    def wait_for(self, num_responses: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.responses) >= num_responses, WAIT_S)


class FakeRequest:
    """An InferenceRequest."""

    def __init__(
        self, tensors: Mapping[str, Any], parameters: Mapping[str, Any] | None = None, outputs: set[str] | None = None
    ) -> None:
        self.sender = FakeSender()
        self._tensors = tensors
        self._parameters = parameters
        self._outputs = outputs or {tensor.name for tensor in OUTPUTS}

    def get_response_sender(self) -> FakeSender:
        return self.sender

    def inputs(self) -> list[_Tensor]:
        return [_Tensor(name, array) for name, array in self._tensors.items()]

    def parameters(self) -> str:
        return "" if self._parameters is None else json.dumps(self._parameters)

    def requested_output_names(self) -> set[str]:
        return self._outputs
