"""Free TCP ports on the loopback address."""

import random
import socket
from pathlib import Path

from controlplane.errors import StartError

_RANGE_FILE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_LOWEST = 15_000  # Above the ports of well-known services, so that those can still be started later.
_HIGHEST = 65_000  # Used where the kernel hands out ports from so far down that little lies below.
_ROOM = 5_000  # Fewer ports than this would make parallel starts collide.
_DRAWS = 200  # Bounds the search; on a machine with half of all ports taken 100 are found.


def free_ports(count: int) -> tuple[int, ...]:
    """Return `count` different ports on which nothing listens now.

    They lie below the range from which the kernel serves outgoing connections, so that a port stays free while
    its server restarts. Another process may still take one first: the caller retries its start.
    Raises `StartError` when there are too few.
    """
    below = int(_RANGE_FILE.read_text().split()[0])
    highest = below if below >= _LOWEST + _ROOM else _HIGHEST
    chosen: list[int] = []
    for port in random.SystemRandom().sample(range(_LOWEST, highest), _DRAWS):
        if len(chosen) == count:
            break
        if _is_free(port):
            chosen.append(port)
    if len(chosen) < count:
        raise StartError(f"found {len(chosen)} free ports of {count} from {_LOWEST} to {highest}")
    return tuple(chosen)


def _is_free(port: int) -> bool:
    """Whether a server could listen on `port` now."""
    with socket.socket() as probe:
        # As servers do: a port whose old connections linger in TIME_WAIT is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
