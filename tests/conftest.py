"""What every test gets: one thread, fixed seeds, the --soak switch, a tiny tokenizer."""

from __future__ import annotations

import gc
import os
import random
import shutil
import signal
import sys
from collections.abc import Generator, Iterator
from pathlib import Path

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # read when the library starts
# Servers are forked by a process that talks gRPC: its fork handlers made one child in seven die before it became one.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

import hypothesis
import numpy as np
import pytest
import torch

from nsm_core.tokenizer import BpeTokenizer, Tokenizer
from service.backends.triton.dev_server import default_home
from tests.support.control_groups import group_root
from tests.support.counts import enable_soak, is_soak
from tests.support.interpreter import patch_language_once_per_launch
from tests.support.order import longest_first
from tests.support.samples import sample_texts
from tests.support.slow_steps import name_file
from tests.support.tiers import Tier, Tiers

if not torch.cuda.is_available():
    # Kernels run in their compiler's interpreter: slow, but the same programs. Read when triton is imported, whoever
    # does so first.
    os.environ.setdefault("TRITON_INTERPRET", "1")

pytest_plugins = ["tests.support.redis_servers", "tests.support.triton_servers", "tests.support.backends"]

TESTS = Path(__file__).resolve().parent
# Markers of tests that --no-skips lets a machine skip: no package of the system would help
EXCUSED = {"control_group", "gpu", "image", "other_library", "perf_analyzer", "tmpfs"}
PROGRAMS = {"chromium": "chromium", "haproxy": "haproxy", "nginx": "nginx", "redis": "redis-server"}
CAP_SYS_ADMIN = 21

# A run that a shell started in the background has SIGINT ignored, and so would the programs that tests interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)
torch.set_num_threads(1)
hypothesis.settings.register_profile("reduced", max_examples=25, deadline=None, derandomize=True, database=None)
hypothesis.settings.register_profile("soak", max_examples=1000, deadline=None, print_blob=True)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--soak", action="store_true", help="full counts and all tests")
    parser.addoption("--fast", action="store_true", help="only tests that need nothing but the environment")
    parser.addoption("--no-skips", action="store_true", help="fail the run when a test is skipped; see EXCUSED")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--soak"):
        enable_soak()
    hypothesis.settings.load_profile("soak" if is_soak() else "reduced")
    name_file()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Files without tests of a tier need not be imported for it; whoever names one wants it."""
    is_named = any(Path(arg.partition("::")[0]).resolve() == collection_path for arg in config.invocation_params.args)
    if not config.getoption("--fast") or is_named or not collection_path.is_relative_to(TESTS):
        return None
    relative = str(collection_path.relative_to(TESTS.parent))
    return None if collection_path == TESTS or Tiers.load().may_hold(relative, Tier.FAST) else True


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What this run does not want is deselected; what this machine cannot run is skipped, with the reason."""
    tiers, last = Tiers.load(), Tier.SOAK if is_soak() else Tier.FAST if config.getoption("--fast") else Tier.TEST
    is_named = any("::" in arg for arg in config.invocation_params.args)  # whoever names a test wants it
    chosen = [item for item in items if _is_chosen(item) and (is_named or tiers.of(item) <= last)]
    if len(chosen) < len(items):
        wanted = set(chosen)
        config.hook.pytest_deselected(items=[item for item in items if item not in wanted])
        items[:] = chosen
    if hasattr(config, "workerinput"):  # of xdist
        items[:] = longest_first(items)
    for marker, reason in _missing().items():
        for item in items:
            if item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What modules make when they are imported stays, so the garbage collector need not look at it, then or later."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if not session.config.getoption("--no-skips") or reporter is None:
        return
    reports = reporter.stats.get("skipped", ())
    skipped = [report for report in reports if not EXCUSED & set(getattr(report, "keywords", ()))]
    if skipped and session.exitstatus == pytest.ExitCode.OK:
        reporter.ensure_newline()
        reporter.write_line(f"--no-skips: {len(skipped)} skipped, which fails this run", red=True)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def _missing() -> dict[str, str]:
    """Markers whose tests cannot run on this machine, and why."""
    missing = {
        marker: f"no {program}; Debian has it in a package of this name"
        for marker, program in PROGRAMS.items()
        if shutil.which(program) is None
    }
    if not torch.cuda.is_available():
        missing["gpu"] = "no CUDA device"
    if shutil.which("prometheus") is None or shutil.which("promtool") is None:
        missing["prometheus"] = "no prometheus; Debian has it, and promtool, in the package prometheus"
    if shutil.which("buildah") is None or shutil.which("debootstrap") is None or os.geteuid() != 0:
        missing["image"] = "images are built as root with buildah and debootstrap; Debian has packages of these names"
    if not (default_home() / ".ready").exists():
        missing["triton"] = "no Triton server; scripts/triton-server installs one"
    if not (Path(sys.prefix) / "perf-analyzer" / ".ready").exists():
        missing["perf_analyzer"] = "no perf_analyzer; scripts/perf-analyzer installs it where it can run"
    if not (Path(sys.prefix) / "client-generator" / ".ready").exists():
        missing["client_generator"] = "no openapi-python-client; scripts/client-generator installs it"
    if group_root() is None:
        missing["control_group"] = "not allowed to make a control group with a limit of memory"
    if not _may_mount():
        missing["tmpfs"] = "not allowed to mount a file system"
    return missing


def _may_mount() -> bool:
    """Whether this process has CAP_SYS_ADMIN; also root often lacks it in a container."""
    status = Path("/proc/self/status").read_text() if sys.platform == "linux" else ""
    capabilities = [line.split()[1] for line in status.splitlines() if line.startswith("CapEff:")]
    return any(int(mask, 16) >> CAP_SYS_ADMIN & 1 for mask in capabilities)


def _is_chosen(item: pytest.Item) -> bool:
    """Images are built only where somebody asks for them by `-m image`."""
    return item.get_closest_marker("image") is None or item.config.getoption("-m") == "image"


@pytest.fixture(autouse=True)
def fixed_seeds() -> None:
    random.seed(0)
    np.random.seed(0)
    if torch.cuda.is_initialized():
        torch.manual_seed(0)
    else:  # which for a GPU that nobody uses writes down its callers, for each test
        torch.default_generator.manual_seed(0)


@pytest.fixture(scope="session", autouse=True)
def quick_interpreter() -> Iterator[None]:
    """For kernels that the tests of this run have imported, where there is no GPU for them."""
    with pytest.MonkeyPatch.context() as patch:
        if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") == "1":
            patch_language_once_per_launch(patch)
        yield


@pytest.fixture(scope="session")
def tiny_tokenizer() -> Tokenizer:
    """A byte-level BPE of 512 tokens, trained on the bundled excerpts."""
    return BpeTokenizer.train(sample_texts("train"), vocab_size=512)
