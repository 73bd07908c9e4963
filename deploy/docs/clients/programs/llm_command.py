import tempfile
from pathlib import Path

from command import run
from report import MODEL, URL, attempt

folder = Path(tempfile.mkdtemp())
entry = f"- model_id: nsm\n  model_name: {MODEL}\n  api_base: {URL}/v1\n"
(folder / "extra-openai-models.yaml").write_text(entry)
OPTIONS = ("-m", "nsm", "-o", "max_tokens", "8")
SETTINGS = {"LLM_USER_PATH": str(folder), "OPENAI_API_KEY": "none"}
attempt("streamed chat", lambda: run("llm", "Hello", *OPTIONS, **SETTINGS).strip())
attempt("chat", lambda: run("llm", "Hello", "--no-stream", *OPTIONS, **SETTINGS).strip())
attempt("next message", lambda: run("llm", "And?", "-c", *OPTIONS, **SETTINGS).strip())
