import json
import tempfile
from pathlib import Path

from command import run
from report import MODEL, URL, attempt

ROOT = Path(__file__).resolve().parents[4]
MODEL_FOLDER = ROOT / "nsm_core" / "model" / "checkpoints" / MODEL


def num_requests(kind: str) -> float:
    out = Path(tempfile.mkdtemp())
    run(
        "aiperf",
        "profile",
        *("--model", MODEL, "--url", URL, "--endpoint-type", kind, "--streaming", "--tokenizer", MODEL_FOLDER),
        *("--concurrency", "2", "--request-count", "8", "--output-tokens-mean", "16"),
        *("--prompt-input-tokens-mean", "32", "--ui", "none", "--artifact-dir", out),
    )
    written = json.loads((out / "profile_export_aiperf.json").read_text())
    return 0 if written["error_summary"] else written["request_count"]["avg"]


attempt("streamed completions", lambda: num_requests("completions") == 8)
attempt("streamed chat", lambda: num_requests("chat") == 8)
