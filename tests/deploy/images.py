"""Images built without an engine and a registry, and started as an orchestrator would: read-only, as their own user."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.deploy.compose import ROOT
from tests.support.redis_servers import die_with_the_tests

IMAGE = ROOT / "deploy" / "image"
BASE = "localhost/nsm-base:bookworm"
# In a mount namespace of its own: the image's root read-only, /tmp and /dev/shm in memory, a directory at /data.
CONFINED = """
root=$1 data=$2; shift 2
mount --make-rprivate /
mount --bind "$root" "$root"
mount -t proc proc "$root/proc"
mount -t tmpfs -o mode=755 tmpfs "$root/dev"
for device in null zero full random urandom; do
  : >"$root/dev/$device"
  mount --bind "/dev/$device" "$root/dev/$device"
done
ln -s /proc/self/fd "$root/dev/fd"
mkdir "$root/dev/shm"
mount -o remount,ro "$root/dev"
mount -t tmpfs -o mode=1777,size=256m tmpfs "$root/dev/shm"
mount -t tmpfs -o mode=1777,size=512m tmpfs "$root/tmp"
if [ -d "$root/data" ]; then mount --bind "$data" "$root/data"; fi
mount -o remount,bind,ro "$root"
exec chroot "$root" "$@"
"""
UNPRIVILEGED = ("--clear-groups", "--no-new-privs", "--bounding-set=-all", "--inh-caps=-all")


def run(*command: object) -> str:
    """Standard output; what it says on failure is in the error."""
    done = subprocess.run([str(word) for word in command], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout


def pip_of_this_machine(directory: Path) -> list[str]:
    """Options of buildah that let a build's pip fetch from where this machine's does: indexes, folders, authorities."""
    lines = run(sys.executable, "-m", "pip", "config", "list").splitlines()
    found = {name.split(".")[-1]: value.strip("'") for name, _, value in (line.partition("=") for line in lines)}
    config = {name: found[name] for name in ("index-url", "extra-index-url", "find-links") if name in found}
    paths = {word.removeprefix("file://") for value in config.values() for word in value.split()}
    if "cert" in found:
        shutil.copy(found["cert"], directory / "cert.pem")  # its own place would hide the image's
        config["cert"] = "/run/pip/cert.pem"
    (directory / "pip.conf").write_text("[global]\n" + "".join(f"{name} = {value}\n" for name, value in config.items()))
    folders = sorted(path.removesuffix("/simple") for path in paths if Path(path).is_dir())
    mounts = [f"{directory}/pip.conf:/etc/pip.conf", f"{directory}:/run/pip", *(f"{one}:{one}" for one in folders)]
    return [f"--volume={mount}:ro" for mount in mounts]


class Builder:
    """Builds what tests ask for; layers are kept on the machine, so that the next run takes seconds."""

    def __init__(self, directory: Path) -> None:
        run(IMAGE / "base")
        self._options = [f"--build-arg=BASE_IMAGE={BASE}", *pip_of_this_machine(directory)]

    def target(self, name: str, *options: str) -> Image:
        tag = f"localhost/nsm-{name}:test"
        run(IMAGE / "build", name, tag, *self._options, *options)
        return Image(tag)

    def triton_stand_in(self) -> str:
        tag, file = "localhost/nsm-triton-stand-in:test", ROOT / "tests" / "deploy" / "triton_stand_in" / "Dockerfile"
        own = ("--isolation=chroot", "--format=docker", "--layers", f"--tag={tag}", f"--file={file}")
        run("buildah", "build", *own, *self._options, ROOT / "scripts")
        return tag


class Image:
    def __init__(self, tag: str) -> None:
        self.tag = tag
        self.described = json.loads(run("buildah", "inspect", "--type=image", tag))["Docker"]
        self.config: dict[str, Any] = self.described["config"]

    @contextlib.contextmanager
    def unpacked_model(self) -> Iterator[Path]:
        """Its files, for reading."""
        container = run("buildah", "from", "--pull-never", self.tag).strip()
        try:
            yield Path(run("buildah", "mount", container).strip())
        finally:
            run("buildah", "umount", container)
            run("buildah", "rm", container)

    @contextlib.contextmanager
    def started(self, directory: Path, *arguments: str, **variables: object) -> Iterator[Container]:
        """`arguments`: instead of its CMD. `directory`: for its data and log. The network is the machine's."""
        user, group = self.config["User"].split(":")
        environment = [*self.config["Env"], *(f"{name}={value}" for name, value in variables.items())]
        inside = ["setpriv", f"--reuid={user}", f"--regid={group}", *UNPRIVILEGED, "env", "-i"]
        inside += ["-C", self.config["WorkingDir"], *environment]
        command = [*self.config["Entrypoint"], *(arguments or self.config.get("Cmd") or ())]
        data = directory / "data"
        data.mkdir(exist_ok=True)
        shutil.chown(data, int(user), int(group))
        with self.unpacked_model() as root, (directory / "log").open("wb") as log:
            process = subprocess.Popen(
                ["unshare", "--mount", "--pid", "--fork", "bash", "-euo", "pipefail", "-c", CONFINED,
                 "bash", root, data, *inside, *command],
                stdout=log, stderr=log, preexec_fn=die_with_the_tests,
            )  # fmt: skip
            container = Container(process, directory / "log", inside)
            try:
                yield container
            finally:
                # the first process: with it end all others of its namespace
                if process.poll() is None and container.pid():
                    run("kill", "-KILL", container.pid())
                process.kill()
                process.wait()


@dataclasses.dataclass(frozen=True)
class Container:
    process: subprocess.Popen[bytes]
    log: Path
    inside: list[str]

    def pid(self) -> str:
        """Of its first process, seen from outside."""
        return Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().strip()

    def execute(self, *command: str) -> subprocess.CompletedProcess[str]:
        """As an orchestrator runs a health check: with its files, user and environment."""
        enter = ["nsenter", f"--target={self.pid()}", "--mount", "--pid", "--root"]
        return subprocess.run([*enter, *self.inside, *command], capture_output=True, text=True, check=False)

    def is_healthy(self, check: list[str]) -> bool:
        """`check`: HEALTHCHECK of its image."""
        assert self.process.poll() is None, self.log.read_text(errors="replace")
        kind, *command = check
        assert kind == "CMD"
        return self.execute(*command).returncode == 0

    def stop(self) -> int:
        """SIGTERM to its first process; its exit status."""
        run("kill", "-TERM", self.pid())
        return self.process.wait(60.0)
