from langchain_openai import ChatOpenAI, OpenAI
from report import MODEL, SCHEMA, URL, attempt

OPTIONS = {"base_url": f"{URL}/v1", "api_key": "none", "model": MODEL}
chat = ChatOpenAI(**OPTIONS, max_completion_tokens=200, seed=1)
form = {"title": "person", **SCHEMA}
attempt("completions", lambda: OpenAI(**OPTIONS, max_tokens=8).invoke("Once upon a time"))
attempt("chat", lambda: chat.invoke("Where does the captain live?").content)
attempt("streamed chat", lambda: "".join(part.content for part in chat.stream("Where does the captain live?")))
attempt("JSON schema", lambda: chat.with_structured_output(form, method="json_schema").invoke("A sailor."))
