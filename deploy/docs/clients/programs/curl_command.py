import json

from command import run
from report import MODEL, URL, attempt

JSON = ("-sS", "--fail-with-body", "-H", "content-type: application/json")
BODY = json.dumps({"model": MODEL, "prompt": "Once", "max_tokens": 8})
STREAM = json.dumps({"model": MODEL, "prompt": "Once", "max_tokens": 8, "stream": True})
attempt("completions", lambda: json.loads(run("curl", *JSON, f"{URL}/v1/completions", "-d", BODY))["choices"])
attempt("stream", lambda: run("curl", "-N", *JSON, f"{URL}/v1/completions", "-d", STREAM).endswith("[DONE]\n\n"))
attempt("HTTP/1.1 HEAD", lambda: "200" in run("curl", "-sSI", f"{URL}/"))
