import tempfile
from pathlib import Path

from command import run
from report import MODEL, URL, attempt

USER = f"""
from locust import HttpUser, task

class Reader(HttpUser):
    @task
    def turn(self):
        self.client.post("/v1/completions", json={{"model": "{MODEL}", "prompt": "Once", "max_tokens": 8}})
"""


def load():
    file = Path(tempfile.mkdtemp()) / "user.py"
    file.write_text(USER)
    run("locust", "-f", file, "--headless", "-u", "2", "-r", "2", "-t", "5s", "-H", URL, "--exit-code-on-error", "1")
    return True


attempt("two users for 5 s", load)
