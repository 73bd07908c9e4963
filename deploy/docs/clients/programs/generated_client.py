import importlib
import json
import sys
import tempfile
from pathlib import Path
from urllib.request import urlopen

from command import run
from report import MODEL, URL, attempt

folder = Path(tempfile.mkdtemp())


def generate():
    file = folder / "openapi.json"
    file.write_bytes(urlopen(f"{URL}/openapi.json").read())
    run("openapi-python-client", "generate", "--path", file, "--output-path", folder / "made", "--meta", "none")
    sys.path.insert(0, str(folder))
    return (folder / "made").is_dir()


def call(module, name, body):
    made = importlib.import_module("made.client").Client(base_url=URL)
    operation = importlib.import_module(f"made.api.{module}.{name}")
    model = getattr(importlib.import_module("made.models"), body[0])
    answer = operation.sync_detailed(client=made, body=model.from_dict(body[1]))
    return answer.status_code == 200 and json.loads(answer.content)["choices"]


attempt("generation", generate)
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8}
name = "create_chat_completion_v1_chat_completions_post"
attempt("chat", lambda: call("chat", name, ("ChatBody", CHAT)))
