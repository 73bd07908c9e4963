import json
import tempfile
from pathlib import Path

from command import run
from report import MODEL, URL, attempt

ROOT = Path(__file__).resolve().parents[4]
TASKS = "tests/clients/lm_eval_tasks"
ARGUMENTS = f"model={MODEL},base_url={URL}/v1/completions,tokenizer_backend=remote"


def metrics(task: str, arguments: str) -> dict:
    folder = tempfile.mkdtemp()
    options = ("--model", "local-completions", "--model_args", f"{ARGUMENTS},{arguments}")
    where = ("--tasks", task, "--include_path", TASKS, "--output_path", folder)
    run("lm_eval", *options, *where, folder=ROOT, HF_HUB_OFFLINE="1", HF_HOME=folder)
    (written,) = Path(folder).rglob("results_*.json")
    return json.loads(written.read_text())["results"][task]


attempt("multiple choice", lambda: 0 <= metrics("nsm_choices", "tokenized_requests=False")["acc,none"] <= 1)
attempt("generation", lambda: "exact_match,none" in metrics("nsm_words", "tokenized_requests=False"))
attempt("bits per byte", lambda: metrics("nsm_texts", "custom_prefix_token_id=0")["bits_per_byte,none"] > 0)
