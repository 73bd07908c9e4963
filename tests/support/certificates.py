"""Certificates for tests that speak TLS: real ones, made by openssl and valid for two days."""

from __future__ import annotations

import dataclasses
import shutil
import subprocess
from pathlib import Path

KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
LOOPBACK = "DNS:localhost,IP:127.0.0.1"


@dataclasses.dataclass(frozen=True)
class Certificate:
    """PEM files."""

    cert: Path
    key: Path


@dataclasses.dataclass(frozen=True)
class Authority:
    """A CA of its own, with its files in `directory`."""

    directory: Path
    ca: Certificate

    @classmethod
    def create(cls, directory: Path) -> Authority:
        directory.mkdir(parents=True)
        return cls(directory, _make(directory, "ca", "-addext", "keyUsage=critical,keyCertSign"))

    def issue(self, name: str, *, hosts: str = LOOPBACK) -> Certificate:
        """For a server or a client. `hosts`: as in openssl's subjectAltName."""
        signed = ("-CA", str(self.ca.cert), "-CAkey", str(self.ca.key), "-addext", "basicConstraints=CA:FALSE")
        return _make(self.directory, name, *signed, "-addext", f"subjectAltName={hosts}")

    def tls_directory(self, directory: Path, name: str) -> Path:
        """A new directory with this CA and a certificate of it, named as in a Kubernetes TLS secret."""
        own = self.issue(name)
        directory.mkdir()
        for file, source in (("ca.crt", self.ca.cert), ("tls.crt", own.cert), ("tls.key", own.key)):
            shutil.copy(source, directory / file)
        return directory


def _make(directory: Path, name: str, *options: str) -> Certificate:
    made = Certificate(directory / f"{name}.pem", directory / f"{name}.key")
    files = ("-keyout", str(made.key), "-out", str(made.cert))
    command = ["openssl", "req", "-x509", *KEY, "-days", "2", "-subj", f"/CN={name} of a test", *files, *options]
    subprocess.run(command, check=True, capture_output=True)
    return made
