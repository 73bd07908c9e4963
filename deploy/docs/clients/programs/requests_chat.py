import requests
from report import ASKED, MODEL, URL, attempt

BODY = {"model": MODEL, "messages": ASKED, "max_tokens": 8}
PATH = f"{URL}/v1/chat/completions"


def stream():
    with requests.post(PATH, json={**BODY, "stream": True}, stream=True, timeout=120) as answer:
        return [line for line in answer.iter_lines() if line][-1] == b"data: [DONE]"


attempt("chat", lambda: requests.post(PATH, json=BODY, timeout=120).json()["choices"])
attempt("streamed chat", stream)
