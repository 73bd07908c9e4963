import json

import httpx
from report import MODEL, URL, attempt

client = httpx.Client(base_url=URL, timeout=120)


def stream():
    session = client.post("/v1/sessions").raise_for_status().json()["id"]
    body = {"input": "Once", "max_tokens": 8, "stream": True}
    with client.stream("POST", f"/v1/sessions/{session}/generate", json=body) as answer:
        frames = [line[6:] for line in answer.iter_lines() if line.startswith("data: ")]
    last = json.loads(frames[-2])
    with client.stream("GET", f"/v1/streams/{last['id']}", headers={"last-event-id": "4"}) as rest:
        again = [line for line in rest.iter_lines() if line.startswith("data: ")]
    return frames[-1] == "[DONE]" and 1 < len(again) < len(frames)


attempt("session's stream, read on", stream)
attempt("models", lambda: client.get("/v1/models").json()["data"][0]["id"] == MODEL)
