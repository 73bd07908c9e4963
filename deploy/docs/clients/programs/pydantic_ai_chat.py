from pydantic import BaseModel, Field
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
from report import MODEL, URL, attempt


class Person(BaseModel):
    name: str = Field(max_length=20)
    age: int = Field(ge=0, le=99)


model = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=f"{URL}/v1", api_key="none"))
SETTINGS = {"max_tokens": 200, "seed": 1}


def ask(output):
    return Agent(model, output_type=output, model_settings=SETTINGS, retries=0).run_sync("Who is there?").output


attempt("chat", lambda: ask(str))
attempt("JSON schema", lambda: ask(NativeOutput(Person)))
attempt("tools", lambda: ask(ToolOutput(Person)))
