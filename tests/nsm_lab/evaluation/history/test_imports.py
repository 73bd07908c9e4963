from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import sys
sys.modules.update(dict.fromkeys(("tokenizers", "xxhash", "zstandard", "orjson", "redis", "pydantic")))
from nsm_lab.evaluation.history import curves, key_tasks, measure, reach, section
"""


def test_history_is_measured_without_tokenizer_or_server() -> None:
    """So that a machine with torch, numpy and matplotlib alone can run it on token ids."""
    subprocess.run([sys.executable, "-c", PROGRAM], check=True, timeout=100)
