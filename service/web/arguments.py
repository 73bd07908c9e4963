"""The arguments of an endpoint, without what FastAPI does for kinds of parameters that no endpoint here has.

FastAPI solves each dependency with exit stacks, scopes, caches and responses of its own. Its checks of values, and so
their errors, are the same here.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi._compat import ModelField, Undefined
from fastapi.dependencies.models import Dependant
from fastapi.dependencies.utils import request_body_to_args, request_params_to_args
from fastapi.exceptions import RequestValidationError
from starlette.requests import Request

AsyncCall = Callable[..., Coroutine[Any, Any, Any]]


@dataclasses.dataclass(frozen=True, slots=True)
class Arguments:
    """Of one function: of an endpoint, or of a dependency with its `name` among those of another.

    `body`: the fields, one or none; `dependencies`: in the order in which they are called.
    """

    call: AsyncCall
    name: str
    request_name: str | None
    path: list[ModelField]
    query: list[ModelField]
    header: list[ModelField]
    body: list[ModelField]
    dependencies: tuple[Arguments, ...]

    async def of(self, request: Request, body: Any = Undefined) -> dict[str, Any]:
        """By name. `body`: the value of the JSON text, if there is one. Raises RequestValidationError, and what the
        dependencies raise.
        """
        errors: list[Any] = []
        values = await self._read(request, body, {}, errors)
        if errors:
            raise RequestValidationError(errors, body=None if body is Undefined else body)
        return values

    async def _read(
        self, request: Request, body: Any, known: dict[AsyncCall, Any], errors: list[Any]
    ) -> dict[str, Any]:
        """`known`: the values of dependencies that were called. A dependency with an error is not called."""
        values: dict[str, Any] = {}
        for dependency in self.dependencies:
            if dependency.call not in known:
                num_errors = len(errors)
                arguments = await dependency._read(request, body, known, errors)
                if len(errors) > num_errors:
                    continue
                known[dependency.call] = await dependency.call(**arguments)
            values[dependency.name] = known[dependency.call]
        if self.path:
            _add(values, errors, request_params_to_args(self.path, request.path_params))
        if self.query:
            _add(values, errors, request_params_to_args(self.query, request.query_params))
        if self.header:
            _add(values, errors, request_params_to_args(self.header, request.headers))
        if self.body:
            found = await request_body_to_args(body_fields=self.body, received_body=body, embed_body_fields=False)
            _add(values, errors, found)
        if self.request_name is not None:
            values[self.request_name] = request
        return values


def _add(values: dict[str, Any], errors: list[Any], found: tuple[dict[str, Any], list[Any]]) -> None:
    values.update(found[0])
    errors.extend(found[1])


def arguments_of(dependant: Dependant) -> Arguments | None:
    """None for a function that needs more of FastAPI, such as a dependency that is cleaned up afterwards."""
    dependencies = [arguments_of(dependency) for dependency in dependant.dependencies]
    known = [dependency for dependency in dependencies if dependency is not None]
    call = dependant.call
    if not inspect.iscoroutinefunction(call) or len(known) < len(dependencies) or _needs_more(dependant):
        return None
    return Arguments(
        call,
        dependant.name or "",
        dependant.request_param_name,
        dependant.path_params,
        dependant.query_params,
        dependant.header_params,
        dependant.body_params,
        tuple(known),
    )


def _needs_more(dependant: Dependant) -> bool:
    others = (
        dependant.websocket_param_name,
        dependant.http_connection_param_name,
        dependant.response_param_name,
        dependant.background_tasks_param_name,
        dependant.security_scopes_param_name,
        dependant.own_oauth_scopes,
        dependant.concurrency,
        dependant.cookie_params,
    )
    return any(others) or not dependant.use_cache or len(dependant.body_params) > 1
