"""Stock client libraries against the server at a URL: run by their own Python, writes one line of JSON.

Usage: python ask.py BASE_URL LIBRARY. What a library gives is a typed value, or it raises.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

MAX_TOKENS = 600
QUESTION = "Which book?"


class Book(BaseModel):
    """A book."""

    model_config = ConfigDict(extra="forbid")

    title: str = Field(max_length=6)
    kind: Literal["tale", "novel"]
    year: int = Field(ge=1800, le=1900)


def ask_instructor(url: str) -> dict[str, Any]:
    import instructor
    from openai import OpenAI

    answers = {}
    for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
        client = instructor.from_openai(OpenAI(base_url=url, api_key="none"), mode=mode)
        book = client.chat.completions.create(
            model="random",
            response_model=Book,
            messages=[{"role": "user", "content": QUESTION}],
            max_tokens=MAX_TOKENS,
            max_retries=0,
        )
        answers[mode.value] = book.model_dump()
    return answers


def ask_pydantic_ai(url: str) -> dict[str, Any]:
    from pydantic_ai import Agent, NativeOutput
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    model = OpenAIChatModel("random", provider=OpenAIProvider(base_url=url, api_key="none"))
    answers = {}
    for name, output in (("tool", Book), ("native", NativeOutput(Book))):
        agent = Agent(model, output_type=output, retries=0, model_settings={"max_tokens": MAX_TOKENS})
        answers[name] = asyncio.run(agent.run(QUESTION)).output.model_dump()
    return answers


def ask_langchain(url: str) -> dict[str, Any]:
    from langchain_openai import ChatOpenAI

    chat = ChatOpenAI(model="random", base_url=url, api_key="none", max_tokens=MAX_TOKENS, max_retries=0)
    answers = {}
    for method in ("json_schema", "function_calling"):
        answers[method] = chat.with_structured_output(Book, method=method).invoke(QUESTION).model_dump()
    message = chat.bind_tools([Book], tool_choice="required").invoke(QUESTION)
    answers["bind_tools"] = message.tool_calls[0]["args"]
    return answers


LIBRARIES = {"instructor": ask_instructor, "pydantic_ai": ask_pydantic_ai, "langchain": ask_langchain}

if __name__ == "__main__":
    sys.stdout.write(json.dumps(LIBRARIES[sys.argv[2]](sys.argv[1])) + "\n")
