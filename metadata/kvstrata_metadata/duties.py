"""The parts of the service that work on one store, put together once."""

from kvstrata_metadata.authority import Authority
from kvstrata_metadata.cluster import Cluster
from kvstrata_metadata.eraser import Eraser
from kvstrata_metadata.nominator import Departures, Nominator
from kvstrata_metadata.store import Store
from kvstrata_metadata.survey import Survey
from kvstrata_metadata.sweeper import Sweeper


class Duties:
    """What one replica does, or stands ready to do."""

    def __init__(self, store: Store, cluster: Cluster | None, authority: Authority) -> None:
        self.sweeper = Sweeper(store, cluster.agent_leases if cluster else None, authority)
        self.eraser = Eraser(store, cluster.scope_owners if cluster else None, authority)
        self.nominator = Nominator(store, authority)
        self.survey = Survey(store)
        self.departures = Departures()
