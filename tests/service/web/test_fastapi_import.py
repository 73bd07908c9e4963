"""A server imports FastAPI without what only its description needs, which is whole when somebody reads it."""

from __future__ import annotations

import subprocess
import sys

LATER = """
import sys
from pydantic import BaseModel
from service.web.fastapi_import import OLD_MODELS, importing_fastapi

before = BaseModel.model_config
with importing_fastapi():
    from fastapi import FastAPI
    from fastapi.openapi.models import OpenAPI
    try:
        import pydantic.v1
    except ImportError:
        pass
    else:
        raise AssertionError(OLD_MODELS)
assert BaseModel.model_config is before, "models that come later are prepared as ever"
assert not OpenAPI.__pydantic_complete__
app = FastAPI(title="lazy")
described = OpenAPI.model_validate(app.openapi())
assert described.info.title == "lazy" and OpenAPI.__pydantic_complete__
import pydantic.v1
with importing_fastapi():
    assert OLD_MODELS in sys.modules, "whoever has them keeps them"
"""


def test_models_of_the_description_are_prepared_when_it_is_read() -> None:
    done = subprocess.run([sys.executable, "-c", LATER], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
