"""The programs of docs/export.md and its notes, as they stand, where neither this package nor torch can be imported."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import torch

from nsm_core.model.loader import load_checkpoint

ROOT = Path(__file__).parents[3]
PAGES = (ROOT / "docs" / "export.md", ROOT / "benchmarks" / "notes" / "export.md")
WITHOUT_TORCH = "import sys; sys.modules['torch'] = sys.modules['nsm_core'] = None\n"


def run(program: str, folder: Path) -> str:
    command = [sys.executable, "-c", WITHOUT_TORCH + program]
    return subprocess.run(command, cwd=folder, capture_output=True, check=True, text=True, timeout=100).stdout


def programs() -> list[str]:
    text = "".join(page.read_text("utf-8") for page in PAGES)
    return re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)


def test_the_example_writes_what_the_model_writes(bundled: Path) -> None:
    loaded = load_checkpoint(Path("pulse-books-small"))
    model, state, text = loaded.model, loaded.model.initial_state(1), []
    prompt = [loaded.tokenizer.end_of_text_id, *loaded.tokenizer.encode("It was a bright morning")]
    for index in range(len(prompt) + 24):
        token = prompt[index] if index < len(prompt) else text[-1]
        hidden, state = model.step(torch.tensor([token]), state)
        if index >= len(prompt) - 1:
            text.append(int(model.logits(hidden).argmax()))
    assert run(programs()[0], bundled) == loaded.tokenizer.decode(text[:24]) + "\n"


def test_trtexecs_command_names_every_input_at_three_batch_sizes(bundled: Path) -> None:
    command = run(programs()[1], bundled)
    spec = load_checkpoint(Path("pulse-books-small")).model.state_spec
    for option, rows in (("min", 1), ("opt", 32), ("max", 256)):
        (given,) = re.findall(rf"--{option}Shapes=(\S+)", command)
        wanted = {"ids": [rows], **{tensor.name: [rows, *tensor.shape] for tensor in spec.tensors}}
        shapes = dict(part.split(":") for part in given.split(","))
        assert {name: [int(size) for size in shape.split("x")] for name, shape in shapes.items()} == wanted
