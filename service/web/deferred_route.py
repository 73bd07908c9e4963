"""A route that is prepared when it is first asked for or described: a start has a hundred, a server uses a few."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi.routing import APIRoute
from starlette.routing import compile_path

from service.web.fastapi_import import importing_fastapi


class DeferredRoute(APIRoute):
    """Until then it has what finds it by path and method. Threads that prepare it at once make the same of it."""

    def __init__(self, path: str, endpoint: Callable[..., Any], *, methods: list[str], **options: Any) -> None:
        self.path, self.endpoint, self.name, self.methods = path, endpoint, endpoint.__name__, set(methods)
        self.path_regex, self.path_format, self.param_convertors = compile_path(path)
        self._options: dict[str, Any] | None = {**options, "methods": methods}

    def __getattr__(self, name: str) -> Any:
        """Of anything else that a route has."""
        options = self.__dict__.get("_options")
        if options is None:
            raise AttributeError(name)
        with importing_fastapi():
            super().__init__(self.path, self.endpoint, **options)
        self._options = None
        return getattr(self, name)
