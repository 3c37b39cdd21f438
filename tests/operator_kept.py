"""A simulated cluster that the operator sees as it does in life: through a World that hears of each change once."""

from operator_fleet import Fleet

from kvstrata_operator.observe import kinds
from kvstrata_operator.observe.world import View, World


class KeptFleet(Fleet):
    """Is seen through a World that hears of each change once."""

    def view(self) -> View:
        """Tell the world what has changed, in some order."""
        whole = super().view()
        if not hasattr(self, "world"):
            self.world = World(lambda: None, lambda: None)
        seen = {
            kinds.POOL: whole.pools, kinds.TENANT: whole.tenants, kinds.NODE: whole.nodes,
            kinds.POOL_NODE: whole.pool_nodes, kinds.SECRET: whole.secrets, kinds.CONFIG_MAP: whole.config_maps,
            kinds.OPERATION: whole.operations, kinds.DAEMON_SET: whole.daemon_sets, kinds.BUDGET: whole.budgets,
            kinds.POD: whole.pods,
        }  # fmt: skip
        for kind, records in seen.items():
            store = self.world.stores[kind]
            for key in store.items.keys() - records.keys():
                store.remove(key, store.items[key].uid)
            for record in records.values():
                store.put(record)
        return self.world.view(whole.alive, whole.silent, whole.keks, whole.failures)
