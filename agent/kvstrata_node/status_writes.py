"""When a KVPoolNode is worth a write by node preparation, and what is written. Pure."""

from enum import IntEnum
from typing import Final

from kvstrata_api import names
from kvstrata_api.models import conditions
from kvstrata_api.models.conditions import Condition
from kvstrata_api.models.inventory import NodeReport
from kvstrata_kube.answers import Json
from kvstrata_node import dax_verdict, inventory
from kvstrata_node import pages_verdict as verdict
from kvstrata_node.declared import Asked

_OWN: Final = frozenset(dax_verdict.Reason)
"""An agent that is gone has left other reasons, of devices that nobody here knows."""
FREE_S: Final = 60.0
"""Free pages are written at most so often when nothing else has changed: agents take and give them all the time."""


class Urgency(IntEnum):
    """How soon a KVPoolNode should be written."""

    NONE = 0
    FREE = 1
    FACTS = 2


def conditions_of(asked: Asked, told: NodeReport) -> tuple[Condition, ...]:
    """Conditions HugepagesReserved and DevicePresent of one pool while no agent is there to write them; else none.

    DevicePresent is of NVMe devices and GPUs too, so it is said only of tiers that want a dax device, or wanted one.
    """
    if asked.has_agent:
        return ()
    pages = verdict.condition(verdict.of_tiers(asked.tiers, told.huge_pages), asked.generation)
    judged = dax_verdict.of_tiers(asked.tiers, told.cxl)
    before = next((c for c in asked.said if c.type == dax_verdict.CONDITION), None)
    if judged[0] is dax_verdict.Reason.NOT_REQUESTED and (before is None or before.reason not in _OWN):
        return (pages,)
    return pages, dax_verdict.condition(judged, asked.generation)


def urgency(asked: Asked, told: NodeReport) -> Urgency:
    """Compare what was found with what the API server holds."""
    said = conditions_of(asked, told)
    if not all(any(_says_the_same(one, before) for before in asked.said) for one in said):
        return Urgency.FACTS
    if asked.report is None or inventory.without_free(asked.report) != inventory.without_free(told):
        return Urgency.FACTS
    return Urgency.NONE if asked.report == told else Urgency.FREE


def _says_the_same(said: Condition, before: Condition) -> bool:
    return (said.type, said.status, said.reason, said.message) == (
        before.type,
        before.status,
        before.reason,
        before.message,
    )


def document(asked: Asked, told: NodeReport, now: str) -> Json:
    """Build the server-side apply document of one KVPoolNode's status."""
    status: Json = {"node": told.to_json()}
    said = conditions_of(asked, told)
    if said:
        known = [c for c in asked.said if any(c.type == one.type for one in said)]
        status["conditions"] = [c.to_json() for c in conditions.merge(known, said, now)]
    return {
        "apiVersion": names.API_VERSION,
        "kind": "KVPoolNode",
        "metadata": {"name": asked.name},
        "status": status,
    }
