"""What the operator was started with. Pure."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Setting:
    """What decisions need of the command line."""

    namespace: str
    """Where Secrets, Leases, connection ConfigMaps and agents live."""
    socket_template: str
    """Path of an agent's socket on its node; `{pool}` stands for the pool's name."""
    agent_template: str = ""
    """ConfigMap with the pod template of agents; empty where others run them."""
    redis_template: str = ""
    """ConfigMap with the StatefulSet of Redis; empty where somebody else runs it."""
    redis_mode: str = ""
    """`Embedded` or `External`, as the release runs Redis; empty where nobody said."""
