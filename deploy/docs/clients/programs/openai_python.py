import json

from openai import NotFoundError, OpenAI
from report import ASKED, MODEL, SCHEMA, URL, attempt

client = OpenAI(base_url=f"{URL}/v1", api_key="none")
TOOL = {"type": "function", "function": {"name": "look", "parameters": SCHEMA}}
FORM = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}}


def chat(**options):
    return client.chat.completions.create(model=MODEL, messages=ASKED, max_completion_tokens=200, seed=1, **options)


def chained():
    first = client.responses.create(model=MODEL, input="Hello", max_output_tokens=16)
    second = client.responses.create(model=MODEL, input="And?", previous_response_id=first.id, max_output_tokens=16)
    return second.output_text and second.usage.input_tokens_details.cached_tokens > 0


def refused():
    try:
        client.models.retrieve("no-such-model")
    except NotFoundError as error:
        return error.code == "model_not_found"


attempt("models", lambda: client.models.list().data[0].id == MODEL)
attempt("completions", lambda: client.completions.create(model=MODEL, prompt="Once", max_tokens=8).choices[0].text)
attempt("chat", lambda: chat().choices[0].message.content)
attempt("streamed chat", lambda: "".join(part.choices[0].delta.content or "" for part in chat(stream=True)))
attempt("JSON schema", lambda: json.loads(chat(response_format=FORM).choices[0].message.content))
attempt("tools", lambda: chat(tools=[TOOL], tool_choice="required").choices[0].message.tool_calls)
attempt("chained responses", chained)
attempt("typed errors", refused)
