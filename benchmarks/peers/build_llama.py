"""llama.cpp and its models for `benchmarks.peers`, built on this machine: `python -m benchmarks.peers.build_llama`.

The source is what the sdist of llama-cpp-python on PyPI carries. Everything lies in one directory outside of the
checkout: an environment with cmake, ninja and gguf; the source; the programs, compiled for this processor; random
models. It takes a C and C++ compiler, about twenty minutes of one core and 1 GB of disk. What is there already is kept.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.peers.models import PEERS, QUANTISED, whole_file

DIRECTORY = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "nsm-peers"
VERSION = "0.3.36"  # of llama-cpp-python
TOOLS = ("cmake", "ninja", "gguf", "scikit-build-core")  # the last: pip asks the sdist for its name through it
PROGRAMS = ("llama-batched-bench", "llama-bench", "llama-quantize", "llama-server")
# GGML_NATIVE: all that this processor can do. No web page and no TLS in the server.
OPTIONS = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DGGML_NATIVE=ON",
    "-DGGML_CCACHE=OFF",
    "-DBUILD_SHARED_LIBS=OFF",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
    "-DLLAMA_BUILD_APP=OFF",
    "-DLLAMA_BUILD_UI=OFF",
    "-DLLAMA_USE_PREBUILT_UI=OFF",
    "-DLLAMA_OPENSSL=OFF",
)
CLOCK = Path(__file__).with_name("cpu_clock.c")
ROOT = Path(__file__).parents[2]


class LlamaBuild:
    """Where things lie under `directory`."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.source = directory / "source/vendor/llama.cpp"
        self.clock = directory / "cpu_clock.so"
        self.python = directory / "venv/bin/python"

    def program(self, name: str) -> Path:
        return self.directory / "build/bin" / name

    def model(self, name: str) -> Path:
        return self.directory / "models" / f"{name}.gguf"

    def missing(self) -> list[Path]:
        needed = [*map(self.program, PROGRAMS), *map(self.model, (*PEERS, *QUANTISED)), self.clock]
        return [file for file in needed if not file.exists()]


def make(build: LlamaBuild, *, jobs: int) -> None:
    """Raises CalledProcessError from what it runs, OSError."""
    build.directory.mkdir(parents=True, exist_ok=True)
    if not build.python.exists():
        _run([sys.executable, "-m", "venv", str(build.directory / "venv")])
        _run([str(build.python), "-m", "pip", "install", "--quiet", *TOOLS])
    if not build.source.exists():
        unpack(download(build), build.source)
    compile_programs(build, jobs=jobs)
    _run([os.environ.get("CC", "cc"), "-O2", "-shared", "-fPIC", "-o", str(build.clock), str(CLOCK)])
    if build.missing():
        models = build.model("x").parent
        _run([str(build.python), "-m", "benchmarks.peers.models", str(models)], cwd=ROOT)
        quantise(build, models)


def download(build: LlamaBuild) -> Path:
    """The sdist, by pip."""
    pip = [str(build.python), "-m", "pip", "download", "--quiet", "--no-deps", "--no-build-isolation"]
    name = "llama-cpp-python"
    _run([*pip, "--no-binary", name, "--dest", str(build.directory), f"{name}=={VERSION}"])
    return build.directory / f"llama_cpp_python-{VERSION}.tar.gz"


def unpack(sdist: Path, directory: Path) -> None:
    """llama.cpp alone. `directory` is there when all of it is."""
    partly = directory.parent / "unpacking"
    shutil.rmtree(partly, ignore_errors=True)
    top = f"{sdist.name.removesuffix('.tar.gz')}/vendor/llama.cpp/"
    with tarfile.open(sdist) as archive:
        archive.extraction_filter = getattr(tarfile, "data_filter", None)  # Python before 3.11.4 has none
        archive.extractall(partly, [item for item in archive if item.name.startswith(top)])
    (partly / top).rename(directory)
    shutil.rmtree(partly)


def compile_programs(build: LlamaBuild, *, jobs: int) -> None:
    """What is compiled already stays."""
    bin_directory = build.python.parent
    environ = {**os.environ, "PATH": f"{bin_directory}{os.pathsep}{os.environ['PATH']}"}
    out = str(build.directory / "build")
    _run([str(bin_directory / "cmake"), "-G", "Ninja", "-S", str(build.source), "-B", out, *OPTIONS], env=environ)
    _run([str(bin_directory / "cmake"), "--build", out, "-j", str(jobs), "--target", *PROGRAMS], env=environ)


def quantise(build: LlamaBuild, models: Path) -> None:
    """By llama.cpp's own program: which matrices get more bits is its choice."""
    for name, (peer, kind) in QUANTISED.items():
        _run([str(build.program("llama-quantize")), str(whole_file(models, peer)), str(build.model(name)), kind])
    for peer in {peer for peer, _ in QUANTISED.values()}:
        whole_file(models, peer).unlink()


def _run(command: Sequence[str], *, env: dict[str, str] | None = None, cwd: Path | None = None) -> None:
    print("+", *command, flush=True)
    subprocess.run(command, check=True, env=env, cwd=cwd)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, default=DIRECTORY, help=f"default: {DIRECTORY}")
    parser.add_argument("--jobs", type=int, default=1, help="compilers at a time")
    args = parser.parse_args()
    os.nice(10)
    build = LlamaBuild(args.directory.absolute())
    make(build, jobs=args.jobs)
    print(f"llama.cpp and its models lie in {build.directory}")


if __name__ == "__main__":
    main()
