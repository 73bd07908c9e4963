"""Why a server is not reached whose name has several addresses: gRPC tells of the last one it tried.

`localhost` may be `::1` as well, where nobody listens; that says nothing of a handshake that failed at `127.0.0.1`.
"""

from __future__ import annotations

import asyncio
import dataclasses
import socket

from nsm_core.errors import DeadlineExceeded, EngineDead
from nsm_core.wire.tensors import Tensors
from service.backends.triton.channel import CallFailed, TritonChannel, Unreached
from service.backends.triton.tls import TritonTls

LIMIT_S = 1.0  # for one address


async def ask_or_explain(
    channel: TritonChannel, tensors: Tensors, *, url: str, tls: TritonTls | None, timeout_s: float
) -> Tensors:
    """`channel.ask`, with the best reason that any address of `url` gives where none is reached."""
    try:
        return await channel.ask(tensors, timeout_s=timeout_s)
    except Unreached as error:
        raise await _better_reason(url, tls, tensors) or error from None


async def _better_reason(url: str, tls: TritonTls | None, tensors: Tensors) -> EngineDead | None:
    """None where no address tells more."""
    host, _, port = url.rpartition(":")
    addresses = await _addresses(host.strip("[]"), int(port))
    if len(addresses) < 2:
        return None
    if tls is not None and tls.server_name is None:
        tls = dataclasses.replace(tls, server_name=host.strip("[]"))
    for address in addresses:
        channel = TritonChannel(address, tls=tls)
        try:
            await channel.ask(tensors, timeout_s=LIMIT_S)
        except (Unreached, DeadlineExceeded, CallFailed):
            continue
        except EngineDead as error:
            return error
        finally:
            await channel.close()
    return None


async def _addresses(host: str, port: int) -> list[str]:
    """As gRPC writes them; none where the name is unknown."""
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError:
        return []
    names = {socket.AF_INET: "ipv4:{}:{}", socket.AF_INET6: "ipv6:[{}]:{}"}
    return [names[family].format(*address[:2]) for family, _, _, _, address in found if family in names]
