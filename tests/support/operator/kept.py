"""A simulated cluster that the operator sees as it does in life: through a World that hears of each change once."""

from kvstrata_operator.decide.incremental import FleetFacts, Seen
from kvstrata_operator.observe import kinds
from kvstrata_operator.observe.world import ChangeBus, View, World
from support.operator.fleet import Fleet


class KeptFleet(Fleet):
    """Is seen through a World that hears of each change once."""

    def view(self) -> View:
        """See through the world."""
        return self.seen()[0]

    def seen(self) -> Seen:
        """Tell the world what has changed, in some order."""
        whole = super().view()
        pools, trust, cluster = whole.pools, whole.trust, whole.cluster
        if not hasattr(self, "world"):
            self.world = World(ChangeBus())
            self.facts = FleetFacts.following(self.world)
        seen = {
            kinds.POOL: pools.declared, kinds.TENANT: trust.tenants, kinds.NODE: pools.nodes,
            kinds.POOL_NODE: pools.pool_nodes, kinds.SECRET: trust.secrets, kinds.CONFIG_MAP: cluster.config_maps,
            kinds.OPERATION: pools.operations, kinds.DAEMON_SET: cluster.daemon_sets, kinds.BUDGET: cluster.budgets,
            kinds.POD: cluster.pods, kinds.MODEL_CACHE: pools.model_caches,
        }  # fmt: skip
        for kind, records in seen.items():
            store = self.world.stores[kind]
            for key in store.items.keys() - records.keys():
                store.remove(key, store.items[key].uid)
            for record in records.values():
                store.put(record)
        self.facts.refresh(pools.alive, pools.silent)
        return self.world.view(pools.alive, pools.silent, trust.keks, pools.failures), self.facts
