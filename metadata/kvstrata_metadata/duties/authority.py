"""Whether this replica may decide, and in whose name. Everything else it may do at any time: observe, count, show."""

from typing import Final, Protocol

from kvstrata_kube.leader import Leadership
from kvstrata_metadata.store.records import Mandate

ALONE: Final = "alone"
"""Name of every leader that nobody elected."""


class Authority(Protocol):
    """The right to decide over agents and scopes."""

    @property
    def me(self) -> str:
        """Name of this replica."""

    @property
    def holder(self) -> str:
        """Name of the replica that leads, as far as is known; empty when nobody does."""

    def mandate(self) -> Mandate | None:
        """In whose name to decide now; None while another replica may. Ask again before each decision."""

    def rise(self, floor: int) -> None:
        """Note that the registry obeys term `floor` of somebody else: a mandate needs a higher one."""

    async def step_aside(self) -> None:
        """Let another replica lead for a while; harmless for one that does not lead."""


class Alone:
    """Where there is no Kubernetes nobody is elected: whoever runs decides."""

    me = ALONE
    holder = ALONE

    def __init__(self) -> None:
        self._term = 0

    def mandate(self) -> Mandate | None:
        """Return the mandate of everybody who is alone."""
        return Mandate(self._term, ALONE)

    def rise(self, floor: int) -> None:
        """Rise above whoever was elected before."""
        self._term = floor + 1

    async def step_aside(self) -> None:
        """Go on: there is nobody else."""


class Elected:
    """The holder of the Lease decides."""

    def __init__(self, leadership: Leadership) -> None:
        self._leadership = leadership

    @property
    def me(self) -> str:
        """Name of this replica."""
        return self._leadership.me

    @property
    def holder(self) -> str:
        """Holder of the Lease when it was read last."""
        return self._leadership.holder

    def mandate(self) -> Mandate | None:
        """Return the mandate that the Lease gives; None from well before another may take it."""
        leadership = self._leadership
        return Mandate(leadership.term, leadership.me) if leadership.is_leading() else None

    def rise(self, floor: int) -> None:
        """Have the next renewal write a higher term."""
        self._leadership.rise(floor)

    async def step_aside(self) -> None:
        """Give the Lease up and take it again only later."""
        await self._leadership.step_aside()
