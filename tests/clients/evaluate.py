"""lm-eval against the server at a URL: run by its own Python in the repository, writes one line of JSON.

Usage: python evaluate.py BASE_URL OPTIONS TASK.... OPTIONS is JSON, added to the model's arguments. For each task its
metrics, and for each item what the server's answers came to.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import lm_eval
from lm_eval.tasks import TaskManager

TASKS = Path(__file__).parent / "lm_eval_tasks"


def evaluate(url: str, options: dict[str, Any], tasks: list[str]) -> dict[str, Any]:
    results = lm_eval.simple_evaluate(
        model="local-completions",
        model_args={"model": "random", "base_url": f"{url}/completions", "tokenizer_backend": "remote", **options},
        tasks=tasks,
        task_manager=TaskManager(include_path=str(TASKS), include_defaults=False),
        bootstrap_iters=0,
    )
    return {
        task: {
            "metrics": results["results"][task],
            "items": [[answer for (answer,) in item["resps"]] for item in results["samples"][task]],
        }
        for task in tasks
    }


if __name__ == "__main__":
    answers = evaluate(sys.argv[1], json.loads(sys.argv[2]), sys.argv[3:])
    sys.stdout.write(json.dumps(answers, default=float) + "\n")
