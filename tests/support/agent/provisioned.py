"""A core whose tiers a provisioner sets up, and what the status says of them: for laws of provisioning. No servers."""

from typing import TYPE_CHECKING

from kvstrata_agent.app import observe
from kvstrata_agent.app.standalone.world import NoNetwork
from kvstrata_agent.kube import report
from kvstrata_agent.provision.provisioner import Provisioner
from kvstrata_api.models.base import ObjectMeta
from kvstrata_api.models.conditions import Condition, find
from kvstrata_api.models.poolnode import KVPoolNode, KVPoolNodeSpec, KVPoolNodeStatus, NodeDrain
from support.agent.doubles import Clock, make_core

if TYPE_CHECKING:
    from kvstrata_agent.provision.provisioner import MakeBackend

MEMORY_BYTES = 1 << 40
"""More than any tier of a test asks for."""
GENERATION = 5
REVISION = "r7"


class Provisioned:
    """A node without tiers at first."""

    def __init__(self, make: "MakeBackend") -> None:
        self.clock = Clock()
        self.core = make_core([], self.clock)
        self._make = make
        self.begin_anew()

    def begin_anew(self) -> None:
        """Go on with a provisioner that knows of no tier, as after a start."""
        self.provisioner = Provisioner(self.core.node, self._make, MEMORY_BYTES)

    def status(self, **drain: object) -> KVPoolNodeStatus:
        """What is reported of a KVPoolNode with this drain."""
        asked = NodeDrain.model_validate(drain)
        spec = KVPoolNodeSpec(pool_ref="pool", node_name="node", tiers=(), revision=REVISION, drain=asked)
        pool_node = KVPoolNode(metadata=ObjectMeta(name="pool.node", generation=GENERATION), spec=spec)
        seen = observe.observe(self.core, self.provisioner, pool_node, NoNetwork())
        return report.build_status(seen)

    def condition(self, type_: str) -> Condition:
        """One condition of the status."""
        found = find(self.status().conditions, type_)
        assert found is not None, type_
        return found

    async def close(self) -> None:
        """Release the tiers."""
        await self.core.close()
        await self.provisioner.close()
