import litellm
from report import ASKED, MODEL, URL, attempt

OPTIONS = {"model": f"openai/{MODEL}", "messages": ASKED, "api_base": f"{URL}/v1", "api_key": "none", "max_tokens": 8}
attempt("chat", lambda: litellm.completion(**OPTIONS).choices[0].message.content)
attempt(
    "streamed chat",
    lambda: "".join(part.choices[0].delta.content or "" for part in litellm.completion(**OPTIONS, stream=True)),
)
