"""An RWKV-7 model's tensors as a GGUF file in F32: `python -m benchmarks.peers.rwkv7_gguf TENSORS.npz KEYS.json FILE`.

Runs in an environment with `gguf`, as `benchmarks.peers.models` does. The tensors have GGUF's names and shapes, rows
first; the keys are those of the header, without the family's name in front. The tokenizer is that of the other peers.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from benchmarks.peers.models import MAX_CONTEXT, TOKENIZER, add_tokenizer

FAMILY = "rwkv7"


def write_tensors(tensors: Path, keys: Path, file: Path) -> None:
    """Raises ImportError without `gguf`, OSError."""
    import gguf
    import numpy as np

    writer = gguf.GGUFWriter(file, FAMILY)
    for key, value in {"context_length": MAX_CONTEXT, **json.loads(keys.read_text())}.items():
        (writer.add_float32 if isinstance(value, float) else writer.add_uint32)(f"{FAMILY}.{key}", value)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    add_tokenizer(writer, TOKENIZER)
    with np.load(tensors) as arrays:
        for name in arrays.files:
            writer.add_tensor(name, arrays[name])
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("tensors", "keys", "file"):
        parser.add_argument(name, type=Path)
    arguments = parser.parse_args()
    write_tensors(arguments.tensors, arguments.keys, arguments.file)


if __name__ == "__main__":
    main()
