"""What llama.cpp's programs print, as figures."""

from __future__ import annotations

import tarfile
from pathlib import Path

from benchmarks.peers.build_llama import PROGRAMS, LlamaBuild, unpack
from benchmarks.peers.llama import context_figures, decode_figures, parse_rows, prefill_figures
from benchmarks.peers.models import PEERS, QUANTISED

PRINTED = """warming up
{"n_kv_max": 66, "n_threads": 1, "pp": 1, "tg": 32, "pl": 1, "speed_pp": 333.3, "speed_tg": 310.5}
{"n_kv_max": 66, "n_threads": 1, "pp": 1, "tg": 32, "pl": 8, "speed_pp": 500.0, "speed_tg": 550.25}

llama_perf_context_print: load time = 20 ms
"""


def test_rows_are_found_among_other_lines() -> None:
    rows = list(parse_rows(PRINTED.splitlines()))
    assert [row["pl"] for row in rows] == [1, 8]
    assert decode_figures(rows) == {"decode.1.tokens_per_cpu_s": 310.5, "decode.8.tokens_per_cpu_s": 550.25}
    assert prefill_figures(rows[:1]) == {"prefill.1.tokens_per_cpu_s": 333.3}
    assert context_figures(rows[:1]) == {"context.1.tokens_per_cpu_s": 310.5}


def test_a_build_says_what_it_lacks(tmp_path: Path) -> None:
    build = LlamaBuild(tmp_path)
    assert len(build.missing()) == len(PROGRAMS) + len(PEERS) + len(QUANTISED) + 1
    build.clock.touch()
    assert build.clock not in build.missing()


def test_of_the_sdist_only_llama_cpp_is_unpacked(tmp_path: Path) -> None:
    top = tmp_path / "llama_cpp_python-9.9.9"
    for name in ("vendor/llama.cpp/src/llama.cpp", "setup.py"):
        (top / name).parent.mkdir(parents=True, exist_ok=True)
        (top / name).write_text(name)
    sdist = tmp_path / f"{top.name}.tar.gz"
    with tarfile.open(sdist, "w:gz") as archive:
        archive.add(top, top.name)
    unpack(sdist, tmp_path / "source/vendor/llama.cpp")
    files = [path for path in (tmp_path / "source").rglob("*") if path.is_file()]
    assert files == [tmp_path / "source/vendor/llama.cpp/src/llama.cpp"]
