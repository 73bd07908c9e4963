from typing import Literal

import instructor
from openai import OpenAI
from pydantic import BaseModel
from report import ASKED, MODEL, URL, attempt


class Person(BaseModel):
    # words that the model may choose from: left alone it writes a name without an end
    name: Literal["Ada", "Ben"]
    rank: Literal["captain", "sailor"]


def ask(mode):
    client = instructor.from_openai(OpenAI(base_url=f"{URL}/v1", api_key="none"), mode=mode)
    options = {"response_model": Person, "max_completion_tokens": 200, "seed": 1, "max_retries": 0}
    return client.chat.completions.create(model=MODEL, messages=ASKED, **options)


attempt("JSON schema", lambda: ask(instructor.Mode.JSON_SCHEMA))
attempt("tools", lambda: ask(instructor.Mode.TOOLS))
