from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike
from report import MODEL, URL, attempt

OPTIONS = {"api_base": f"{URL}/v1", "api_key": "none", "model": MODEL, "max_tokens": 8}
chat = OpenAILike(**OPTIONS, is_chat_model=True)
ASKED = [ChatMessage(role="user", content="Where does the captain live?")]
attempt("completions", lambda: OpenAILike(**OPTIONS).complete("Once upon a time").text)
attempt("chat", lambda: chat.chat(ASKED).message.content)
attempt("streamed chat", lambda: "".join(part.delta or "" for part in chat.stream_chat(ASKED)))
