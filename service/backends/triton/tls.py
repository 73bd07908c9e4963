"""TLS between this process and Triton servers: gRPC's credentials, from PEM files that were checked."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import grpc

from nsm_core.errors import ConfigError
from nsm_core.triton.pem_files import check_ca, check_pair

# gRPC's messages about failed handshakes, and ours
NOT_CONNECTED = "failed to connect"
_REASONS = (
    ("CERTIFICATE_VERIFY_FAILED", "its certificate was not signed by the CA that this side trusts"),
    ("Hostname Verification Check failed", "its certificate is for another name than its address"),
    ("WRONG_VERSION_NUMBER", "it speaks without TLS"),
    ("Socket closed", "it hung up at once, as servers do that want TLS, or another certificate of this side"),
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TritonTls:
    """PEM texts. `ca`: who signs the servers' certificates; `cert` and `key`: of this side, both or neither.

    `server_name`: the name that the certificates are for, None for that of each server's address.
    """

    ca: bytes
    cert: bytes | None = None
    key: bytes | None = dataclasses.field(default=None, repr=False)
    server_name: str | None = None

    @classmethod
    def read(
        cls, *, ca: Path, cert: Path | None = None, key: Path | None = None, server_name: str | None = None
    ) -> TritonTls:
        """Raises ConfigError: a file is missing, holds something else, or the key is not the certificate's."""
        check_ca(ca)
        if (cert is None) != (key is None):
            raise ConfigError("a certificate of this side needs its key, and a key its certificate")
        if cert is None or key is None:
            return cls(ca=ca.read_bytes(), server_name=server_name)
        check_pair(cert, key)
        return cls(ca=ca.read_bytes(), cert=cert.read_bytes(), key=key.read_bytes(), server_name=server_name)

    @classmethod
    def read_directory(cls, directory: Path) -> TritonTls:
        """`ca.crt`, and `tls.crt` with `tls.key` if there: the files of a Kubernetes TLS secret. Errors as `read`."""
        cert, key = (path if path.exists() else None for path in (directory / "tls.crt", directory / "tls.key"))
        return cls.read(ca=directory / "ca.crt", cert=cert, key=key)

    def credentials(self) -> grpc.ChannelCredentials:
        return grpc.ssl_channel_credentials(self.ca, self.key, self.cert)

    def options(self) -> tuple[tuple[str, str], ...]:
        """Of the channel."""
        return () if self.server_name is None else (("grpc.ssl_target_name_override", self.server_name),)


def explained(details: str) -> str:
    """gRPC's message about a lost connection, with a handshake's failure in plain words before it."""
    for words, reason in _REASONS:
        if NOT_CONNECTED in details and words in details:
            return f"{reason} ({details})"
    return details


def is_unexplained(details: str) -> bool:
    """Whether a connection failed for a reason that is not one of TLS: at the address that gRPC tried last."""
    return NOT_CONNECTED in details and explained(details) == details
