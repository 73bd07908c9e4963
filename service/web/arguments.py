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

from service.web.headers import has_header, header

AsyncCall = Callable[..., Coroutine[Any, Any, Any]]


@dataclasses.dataclass(frozen=True, slots=True)
class Arguments:
    """Of one function: of an endpoint, or of a dependency with its `name` among those of another.

    `path`, `query`, `header`: the fields that are checked; `path_texts`, `header_texts`: those that may be any text, by
    their names here and in the request. `body`: the fields, one or none. `dependencies`: in the order of their calls.
    """

    call: AsyncCall
    name: str
    request_name: str | None
    path: list[ModelField]
    query: list[ModelField]
    header: list[ModelField]
    body: list[ModelField]
    path_texts: tuple[tuple[str, str], ...]
    header_texts: tuple[tuple[str, bytes, str | None], ...]
    dependencies: tuple[Arguments, ...]
    takes_request_alone: bool

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
            if dependency.call in known or await dependency._call(request, body, known, errors):
                values[dependency.name] = known[dependency.call]
        for name, alias in self.path_texts:
            values[name] = request.path_params[alias]
        for name, header_name, default in self.header_texts:
            values[name] = header(request.scope, header_name) if has_header(request.scope, header_name) else default
        if self.path:
            _add(values, errors, request_params_to_args(self.path, request.path_params))
        if self.query:
            _add(values, errors, request_params_to_args(self.query, request.query_params))
        if self.header:
            _add(values, errors, request_params_to_args(self.header, request.headers))
        if self.body:
            _add(values, errors, await self._read_body(self.body, body))
        if self.request_name is not None:
            values[self.request_name] = request
        return values

    async def _call(self, request: Request, body: Any, known: dict[AsyncCall, Any], errors: list[Any]) -> bool:
        """False if an argument is wrong."""
        if self.takes_request_alone:
            known[self.call] = await self.call(request)
            return True
        num_errors = len(errors)
        arguments = await self._read(request, body, known, errors)
        if len(errors) > num_errors:
            return False
        known[self.call] = await self.call(**arguments)
        return True

    @staticmethod
    async def _read_body(fields: list[ModelField], body: Any) -> tuple[dict[str, Any], list[Any]]:
        if body is Undefined:
            return await request_body_to_args(body_fields=fields, received_body=body, embed_body_fields=False)
        value, errors = fields[0].validate(body, {}, loc=("body",))
        return {fields[0].name: value}, errors


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
    others = (
        dependant.path_params,
        dependant.query_params,
        dependant.header_params,
        dependant.body_params,
        known,
    )
    return Arguments(
        call,
        dependant.name or "",
        dependant.request_param_name,
        [field for field in dependant.path_params if not _is_text(field)],
        dependant.query_params,
        [field for field in dependant.header_params if not _is_text(field)],
        dependant.body_params,
        tuple((field.name, field.alias) for field in dependant.path_params if _is_text(field)),
        tuple(
            (field.name, field.alias.lower().encode(), field.default)
            for field in dependant.header_params
            if _is_text(field)
        ),
        tuple(known),
        takes_request_alone=dependant.request_param_name is not None and not any(others),
    )


def _is_text(field: ModelField) -> bool:
    """Whether every text is a value of it, and its absence, if it has one, another."""
    info = field.field_info
    is_absent_or_text = info.annotation == (str | None) and info.default is None
    return not info.metadata and (is_absent_or_text or (info.annotation is str and info.is_required()))


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
