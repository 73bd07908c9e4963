"""The body of POST /v1/fine_tuning/jobs."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, WithJsonSchema, model_validator

from nsm_core.errors import InvalidRequest
from service.schemas.common import RequestBody
from service.schemas.sessions import SESSION_ID, Metadata
from service.web.errors import shown

MAX_SEED = 2**31 - 1
DEFAULT_NAME = "tuned"


def _auto(kind: str, **bounds: float) -> tuple[BeforeValidator, WithJsonSchema]:
    """`auto` is what an absent field is."""
    schema = {"anyOf": [{"const": "auto"}, {"type": kind, **bounds}]}
    return BeforeValidator(lambda value: None if value == "auto" else value), WithJsonSchema(schema)


class Hyperparameters(RequestBody):
    """None: 3 epochs, 8 examples in a step, the rate that `nsm tune` has by default."""

    n_epochs: Annotated[Annotated[int, Field(ge=1, le=100)] | None, *_auto("integer", minimum=1, maximum=100)] = None
    batch_size: Annotated[Annotated[int, Field(ge=1, le=256)] | None, *_auto("integer", minimum=1, maximum=256)] = None
    learning_rate_multiplier: Annotated[
        Annotated[float, Field(gt=0, le=1000, allow_inf_nan=False)] | None,
        *_auto("number", exclusiveMinimum=0, maximum=1000),
    ] = None


class Supervised(RequestBody):
    """Of `method`."""

    hyperparameters: Hyperparameters = Hyperparameters()


class Method(RequestBody):
    """The kind of training; only one is known."""

    type: Literal["supervised"]
    supervised: Supervised = Supervised()


def _check_suffix(value: str) -> str:
    if not SESSION_ID.fullmatch(value):
        message = f"suffix must be 1 to 64 characters of A-Z, a-z, 0-9, _ and -, got {shown(value)}"
        raise InvalidRequest(message, param="suffix")
    return value


class CreateJobBody(RequestBody):
    """Files of examples, and the name of the state that is made."""

    model: str
    training_file: str = Field(description="an uploaded file with the purpose `fine-tune`")
    validation_file: str | None = Field(default=None, description="to hold out; absent: a tenth of the other")
    suffix: Annotated[str, AfterValidator(_check_suffix), Field(description="the name of the state")] | None = None
    seed: int | None = Field(default=None, ge=0, le=MAX_SEED)
    hyperparameters: Hyperparameters | None = None
    method: Method | None = None
    integrations: list[Any] | None = Field(default=None, max_length=0)
    metadata: Metadata = Field(default={})

    @model_validator(mode="after")
    def _one_source(self) -> CreateJobBody:
        if self.hyperparameters is not None and self.method is not None:
            raise InvalidRequest("hyperparameters excludes method, which has its own", param="hyperparameters")
        return self

    @property
    def wanted(self) -> Hyperparameters:
        """Those of the method, or of the older field."""
        if self.method is not None:
            return self.method.supervised.hyperparameters
        return self.hyperparameters or Hyperparameters()
