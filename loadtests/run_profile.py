"""What a run does: a TOML file, checked once. `loadtests/profiles/` has those that come with the project."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    model_validator,
)

from loadtests.errors import RunError

PROFILES = Path(__file__).resolve().parent / "profiles"
Model = TypeVar("Model", bound=BaseModel)


class Strict(BaseModel):
    """A misspelt name is an error, not a default."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Service(Strict):
    """The servers that a run starts without --url: replicas on one store."""

    replicas: PositiveInt = 2
    max_slots: PositiveInt = 16
    queue_limit: NonNegativeInt = 256
    num_threads: PositiveInt = 1


class Users(Strict):
    """How many there are of each kind; each does one thing after the other (a closed loop)."""

    completion: NonNegativeInt = 0
    chat: NonNegativeInt = 0
    session: NonNegativeInt = 0
    long_context: NonNegativeInt = 0
    fork_storm: NonNegativeInt = 0
    slow_reader: NonNegativeInt = 0
    trouble: NonNegativeInt = 0

    @property
    def total(self) -> int:
        return sum(self.model_dump().values())


class Texts(Strict):
    """The conversations that users have. `scripts`: different ones of each kind."""

    scripts: PositiveInt = 3
    turns: PositiveInt = 3
    max_tokens: PositiveInt = 12  # of an answer
    slow_tokens: PositiveInt = 48  # of an answer to a slow reader
    prompt_tokens: tuple[PositiveInt, ...] = (16, 48, 96)  # lengths of prompts; those of an open loop are the nearest


class Behaviour(Strict):
    """Of single users."""

    think_s: float = Field(default=0.1, ge=0)  # mean pause between two requests of a user
    cancel_share: float = Field(default=0.01, ge=0, le=1)  # of a session's turns: cancelled first, then asked again
    retry_share: float = Field(default=0.01, ge=0, le=1)  # of a session's turns: sent a second time
    long_chunk_tokens: PositiveInt = 256  # by which a long context grows
    long_context_tokens: PositiveInt = 1024  # at which it begins anew
    forks: PositiveInt = 6  # of a storm
    slow_pause_s: PositiveFloat = 0.1  # between two reads of a slow reader


class OpenLoop(Strict):
    """Arrivals from a trace. `rates`: requests a second, or multiples of the capacity that was measured before.

    `mooncake` brings conversations, which are sessions here; `azure` single completions.
    """

    trace: Literal["azure", "mooncake"] = "azure"
    trace_file: Path | None = None  # a whole trace instead of the extract
    rates: tuple[PositiveFloat, ...]
    unit: Literal["per_s", "capacity"] = "per_s"
    step_s: PositiveFloat
    pause_s: float = Field(default=0, ge=0)  # without arrivals, between two steps
    length_scale: PositiveFloat = 0.05
    max_open: PositiveInt = 2000  # requests under way; beyond that the client itself gives up


class Profile(Strict):
    """One run."""

    name: str
    seconds: PositiveFloat  # of the closed loops; an open loop ends with its steps
    drain_s: PositiveFloat = 15.0  # for requests under way then
    timeout_s: PositiveFloat = 60.0  # of a connection that says nothing
    seed: int = 0
    service: Service = Service()
    users: Users = Users()
    texts: Texts = Texts()
    behaviour: Behaviour = Behaviour()
    open_loop: OpenLoop | None = None

    @model_validator(mode="after")
    def _does_something(self) -> Profile:
        if not self.users.total and self.open_loop is None:
            raise ValueError("a profile needs users or an open loop")
        return self

    @property
    def run_s(self) -> float:
        """Until the last request is sent."""
        loop = self.open_loop
        steps_s = 0.0 if loop is None else len(loop.rates) * (loop.step_s + loop.pause_s)
        return max(self.seconds if self.users.total else 0.0, steps_s)


def load_profile(source: str | Path, **changes: Any) -> Profile:
    """A file (TOML, or JSON as `Profile` writes it), or the name of one in PROFILES; `changes` replace its fields.

    Raises RunError.
    """
    path, fields = read_file("profile", source, PROFILES)
    return checked(Profile, path, {"name": path.stem, **fields, **changes})


def read_file(kind: str, source: str | Path, folder: Path) -> tuple[Path, dict[str, Any]]:
    """What a TOML or JSON file holds, or that of a name in `folder`. Raises RunError."""
    path = Path(source)
    if not path.suffix:
        path = folder / f"{path}.toml"
    try:
        text = path.read_text("utf-8")
        return path, json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except OSError as error:
        names = ", ".join(sorted(found.stem for found in folder.glob("*.toml")))
        raise RunError(f"--{kind} {source}: {error.strerror}; the names are {names}") from error
    except ValueError as error:
        raise RunError(f"--{kind} {source}: {error}") from error


def checked(kind: type[Model], path: Path, fields: Mapping[str, Any]) -> Model:
    """Raises RunError that names the first wrong field."""
    try:
        return kind(**fields)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"])
        raise RunError(f"{path}: {name + ': ' if name else ''}{first['msg']}") from error
