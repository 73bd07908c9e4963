import json

import litellm
from report import ASKED, MODEL, SCHEMA, URL, attempt

OPTIONS = {"model": f"openai/{MODEL}", "messages": ASKED, "api_base": f"{URL}/v1", "api_key": "none", "seed": 1}
TOOL = {"type": "function", "function": {"name": "look", "parameters": SCHEMA}}
FORM = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}}


def message(max_tokens=200, **options):
    return litellm.completion(**OPTIONS, max_tokens=max_tokens, **options).choices[0].message


def person(text):
    given = json.loads(text)
    return set(given) == {"name", "age"} and given["age"] <= 99


def called():
    call, *_ = message(tools=[TOOL], tool_choice="required").tool_calls
    return call.function.name == "look" and person(call.function.arguments)


attempt("chat", lambda: message(8).content)
attempt(
    "streamed chat",
    lambda: "".join(
        part.choices[0].delta.content or "" for part in litellm.completion(**OPTIONS, max_tokens=8, stream=True)
    ),
)
attempt("JSON schema", lambda: person(message(response_format=FORM).content))
attempt("tools", called)
