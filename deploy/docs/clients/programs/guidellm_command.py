import json
import tempfile
from pathlib import Path

from command import run
from report import MODEL, URL, attempt

ROOT = Path(__file__).resolve().parents[4]
MODEL_FOLDER = ROOT / "nsm_core" / "model" / "checkpoints" / MODEL


def counts(request_format: str) -> dict:
    out = Path(tempfile.mkdtemp()) / "report.json"
    run(
        "guidellm",
        "run",
        *("--backend", f"kind=openai_http,target={URL},model={MODEL},request_format={request_format}"),
        *("--profile", "kind=concurrent,streams=2", "--constraint", "kind=max_requests,count=8"),
        *("--data", "kind=synthetic_text,prompt_tokens=32,output_tokens=16"),
        *("--tokenizer", f"kind=huggingface_auto,model={MODEL_FOLDER}"),
        *("--output", f"kind=json,path={out}", "--disable-console-interactive"),
    )
    return json.loads(out.read_text())["benchmarks"][0]["metrics"]["request_totals"]


attempt("streamed completions", lambda: counts("/v1/completions")["successful"] == 8)
attempt("streamed chat", lambda: counts("/v1/chat/completions")["successful"] == 8)
