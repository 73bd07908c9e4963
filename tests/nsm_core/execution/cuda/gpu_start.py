"""Prepares an executor on a GPU as a start does, and tells which kernels the rehearsal had not known."""

from __future__ import annotations

import json
import sys

from triton import knobs

from nsm_core.execution.cuda.compiling import compile_ahead
from nsm_core.execution.cuda.executor import CudaExecutor
from nsm_core.execution.cuda.options import CudaOptions
from nsm_core.execution.cuda.self_check import (
    check_rounds,
    computed,
    computed_in_rounds,
    failed_check,
    launch_reference,
)
from tests.support.models import random_model, small_config


def main() -> None:
    config = small_config(48, layer_pattern="KNW", num_memory_slots=32, slot_width=32, window=64)
    model = random_model(config).to("cuda")
    executor = CudaExecutor(model, num_rows=130, options=CudaOptions())

    def launch() -> None:
        executor.launch_all()
        launch_reference(model)

    num_compiled = compile_ahead(launch)
    late: list[str] = []

    def note(*, cache_hit: bool, src: object, **_: object) -> None:
        if not cache_hit:
            late.append(str(getattr(src, "name", src)))

    knobs.compilation.listener = note
    executor.record_all()
    check_rounds(executor, 48)
    failure = failed_check(executor, model, 48)
    bits = [(computed(executor, 48), computed_in_rounds(executor, 48)) for _ in range(2)]
    has_rounds = executor.overlap is not None and executor.overlap.rounds is not None
    found = {"compiled": num_compiled, "late": late, "failure": failure, "has_rounds": has_rounds}
    json.dump(found | {"same_bits": bits[0] == bits[1]}, sys.stdout)


if __name__ == "__main__":
    main()
