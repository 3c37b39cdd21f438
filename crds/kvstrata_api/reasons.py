"""Catalogue of every condition that we write: what each reason means, how bad it is, and what to do about it.

`docs/conditions.md` is made from it, `kvstrata doctor` judges by it, and a test holds it to the code both ways. Pure.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Final


class Weight(StrEnum):
    """How bad a condition is that has this reason, from good to bad."""

    GOOD = "good"
    PASSING = "passing"
    """Healthy objects go through it; bad news only when it lasts."""
    ECHO = "echo"
    """Bad news that another condition, of the same or of another object, has with its cause."""
    WARNING = "warning"
    """It works, otherwise than was asked for."""
    BROKEN = "broken"
    """Something that was asked for does not work."""


@dataclass(frozen=True, slots=True)
class Reason:
    """One reason of conditions of one kind."""

    kind: str
    types: tuple[str, ...]
    """Types of condition that have it with this status."""
    status: str
    """True, False or Unknown."""
    reason: str
    weight: Weight
    help: str
    """What it means."""
    mend: str = ""
    """A command, or what to do; empty for what is good or passes.

    In commands NAME and NAMESPACE are the object's, POOL and NODE those that it names, LABELS those of its
    spec.nodeSelector, SYSTEM is the namespace of the release, CHART what was installed.
    """


COMMANDS: Final = ("helm ", "kubectl ", "kvstrata ")
"""What a mend begins with that is a command."""

_GOOD, _PASSING, _ECHO, _WARNING, _BROKEN = Weight

_EDIT: Final = "correct the field that the message names, and kubectl apply again"
_OPERATOR_LOG: Final = "kubectl -n SYSTEM logs deployment/kvstrata-operator --tail=100"
_AGENT_LOG: Final = "kubectl -n SYSTEM logs -l kvstrata.io/pool=POOL -c agent --prefix --tail=50"
_AGENT_PODS: Final = "kubectl -n SYSTEM describe pods -l kvstrata.io/pool=POOL"
_REDIS_POD: Final = "kubectl -n SYSTEM describe pod kvstrata-redis-0"
_REDIS_LOG: Final = "kubectl -n SYSTEM logs kvstrata-redis-0 --tail=50"
_REDIS_MEMORY: Final = "helm upgrade kvstrata CHART -n SYSTEM --reuse-values --set redis.memory.max=SIZE"
_TEMPLATE: Final = "helm upgrade kvstrata CHART -n SYSTEM --reuse-values"

_POOL: Final = (
    Reason("KVPool", ("Accepted",), "True", "Accepted", _GOOD, "The spec is valid."),
    Reason("KVPool", ("Accepted",), "False", "Invalid", _BROKEN,
           "The spec contradicts itself or a limit; nothing is done for it.", _EDIT),
    Reason("KVPool", ("Provisioned",), "True", "Provisioned", _GOOD,
           "Every node has its KVPoolNode and its agent's pod; the message says on which nodes something differs."),
    Reason("KVPool", ("Provisioned",), "False", "Provisioning", _PASSING, "KVPoolNodes are being made or changed."),
    Reason("KVPool", ("Provisioned",), "False", "ApplyFailed", _BROKEN,
           "The API server refused what the operator wrote for the pool, in the words of the message.", _OPERATOR_LOG),
    Reason("KVPool", ("Provisioned",), "False", "AgentTemplateMissing", _BROKEN,
           "The ConfigMap that agents' pods are made from is not there.", _TEMPLATE),
    Reason("KVPool", ("Provisioned",), "False", "AgentTemplateInvalid", _BROKEN,
           "No agent's pod can be made from the ConfigMap, by the message.", _TEMPLATE),
    Reason("KVPool", ("Provisioned", "Ready"), "False", "NoMatchingNodes", _BROKEN,
           "No node has the labels of spec.nodeSelector.",
           "kubectl label node NODE LABELS"),
    Reason("KVPool", ("Provisioned",), "False", "PathConflict", _BROKEN,
           "An older pool has the same path on a node, which is left out.", "give tiers of this pool other paths"),
    Reason("KVPool", ("Provisioned",), "False", "NameTooLong", _BROKEN,
           "kvstrata-agent.POOL.NODE is too long for a name, so the node is left out.", "give the pool a shorter name"),
    Reason("KVPool", ("Provisioned",), "False", "AgentsNotRunning", _BROKEN,
           "An agent's pod waits and will not run by itself: scheduler, image or folder, by the message.", _AGENT_PODS),
    Reason("KVPool", ("Provisioned",), "False", "AgentsNotStarted", _BROKEN,
           "A node did not start an agent's pod in time: a directory of the host is missing, or its network.",
           _AGENT_PODS),
    Reason("KVPool", ("Provisioned", "Progressing"), "False", "Paused", _WARNING,
           "spec.paused is set: agents keep serving, and nothing is changed.",
           "kubectl patch kvpool NAME --type=merge -p '{\"spec\":{\"paused\":false}}'"),
    Reason("KVPool", ("CapacitySatisfied",), "True", "Satisfied", _GOOD,
           "No node that reported has less than the tiers ask for."),
    Reason("KVPool", ("CapacitySatisfied", "MetadataAvailable"), "Unknown", "NoReport", _PASSING,
           "No agent has reported yet."),
    Reason("KVPool", ("CapacitySatisfied",), "False", "InsufficientCapacity", _BROKEN,
           "An agent could not get what its tiers declare; the message has the numbers.",
           "smaller tiers (capacityPerNode), or more of the medium on the node that the message names"),
    Reason("KVPool", ("CapacitySatisfied",), "False", "InsufficientMemory", _BROKEN,
           "Memory tiers of this and of older pools want more than a node has.",
           "smaller tiers (capacityPerNode), or another spec.nodeSelector"),
    Reason("KVPool", ("MetadataAvailable",), "True", "Available", _GOOD,
           "Every agent that reported reaches the directory; the message warns where Redis may become full."),
    Reason("KVPool", ("MetadataAvailable", "Degraded"), "", "DirectoryAway", _WARNING,
           "Redis does not answer agents: each node serves its own blocks, those of others are misses.", _REDIS_LOG),
    Reason("KVPool", ("MetadataAvailable", "Degraded"), "", "DirectoryPartlyAway", _WARNING,
           "Some primary of a Redis Cluster does not answer agents; its blocks on other nodes are misses.",
           "look at the Redis Cluster that spec.metadata.redis.external names"),
    Reason("KVPool", ("MetadataAvailable", "Degraded"), "", "DirectoryFull", _WARNING,
           "Redis has no memory left: nodes do not learn what others store from now on.", _REDIS_MEMORY),
    Reason("KVPool", ("MetadataAvailable",), "False", "RedisStarting", _PASSING, "The pod of Redis is being made."),
    Reason("KVPool", ("MetadataAvailable",), "False", "RedisRolling", _PASSING,
           "The pod of Redis is being replaced; agents report the directory again afterwards."),
    Reason("KVPool", ("MetadataAvailable", "Degraded"), "", "RedisApplyFailed", _WARNING,
           "The API server refused the StatefulSet of Redis, in the words of the message.", _OPERATOR_LOG),
    Reason("KVPool", ("MetadataAvailable", "Degraded"), "", "RedisModeMismatch", _BROKEN,
           "The pool asks for another kind of Redis than this release runs.",
           "kubectl edit kvpool NAME: set spec.metadata.redis.mode as the message says"),
    Reason("KVPool", ("MetadataAvailable", "Degraded"), "", "RedisTemplateMissing", _WARNING,
           "The ConfigMap that Redis is made from is not there.", _TEMPLATE),
    Reason("KVPool", ("MetadataAvailable", "Degraded"), "", "RedisTemplateInvalid", _WARNING,
           "Redis cannot be made from the ConfigMap, by the message.", _TEMPLATE),
    Reason("KVPool", ("MetadataAvailable", "Degraded"), "", "RedisNotRunning", _WARNING,
           "The pod of Redis waits and will not run by itself, in the words of the message.", _REDIS_POD),
    Reason("KVPool", ("MetadataAvailable", "Degraded"), "", "RedisOutOfMemory", _WARNING,
           "Redis was ended because it took more memory than its limit.", _REDIS_MEMORY),
    Reason("KVPool", ("MetadataAvailable", "Degraded"), "", "RedisNotReady", _WARNING,
           "The pod of Redis runs and does not answer its probe.", _REDIS_LOG),
    Reason("KVPool", ("Progressing",), "False", "Complete", _GOOD, "All nodes run the revision that is declared."),
    Reason("KVPool", ("Progressing",), "True", "RollingOut", _PASSING, "Agents are being replaced, node by node."),
    Reason("KVPool", ("Progressing",), "True", "RemovingTier", _PASSING,
           "A tier was removed from the spec; its blocks move to others first."),
    Reason("KVPool", ("Progressing",), "True", "ShrinkingTier", _PASSING,
           "A tier has become smaller; blocks that have no room move to others first."),
    Reason("KVPool", ("Progressing",), "False", "ProgressDeadlineExceeded", _BROKEN,
           "The new pod of a node is not ready in time; the roll has stopped there.", _AGENT_PODS),
    Reason("KVPool", ("Progressing",), "False", "OnDelete", _WARNING,
           "Pods of an older revision are replaced when somebody deletes them (updateStrategy.type OnDelete).",
           "kubectl -n SYSTEM delete pod POD, node by node"),
    Reason("KVPool", ("Progressing",), "True", "Deleting", _PASSING, "The pool is deleted; its nodes drain."),
    Reason("KVPool", ("Degraded",), "False", "Healthy", _GOOD, "No node reports a fault."),
    Reason("KVPool", ("Degraded",), "True", "LeaseExpired", _ECHO,
           "Agents are silent; their KVPoolNodes say which.", "kubectl get kvpoolnodes"),
    Reason("KVPool", ("Degraded",), "True", "TierDegraded", _ECHO,
           "A tier of a node has lost a part of what it is over; status.tiers of the KVPoolNode has more.",
           "kubectl get kvpoolnodes -o yaml"),
    Reason("KVPool", ("Degraded",), "True", "TierFailed", _ECHO,
           "A tier of a node is out; TierReady of the KVPoolNode has the cause.", "kubectl get kvpoolnodes -o yaml"),
    Reason("KVPool", ("Ready",), "True", "AllNodesReady", _GOOD, "Every node serves what is declared."),
    Reason("KVPool", ("Ready",), "False", "NotAccepted", _ECHO, "See Accepted.", _EDIT),
    Reason("KVPool", ("Ready",), "False", "CapacityNotSatisfied", _ECHO, "See CapacitySatisfied.",
           "smaller tiers (capacityPerNode)"),
    Reason("KVPool", ("Ready",), "False", "NodesNotUpdated", _PASSING,
           "All nodes serve, some of them not yet what the pool declares now."),
    Reason("KVPool", ("Ready",), "False", "NodesNotReady", _PASSING,
           "Some nodes have no agent that serves; the message has the first of them and why.", _AGENT_PODS),
    Reason("KVPool", ("Ready",), "False", "Deleting", _PASSING, "The pool is deleted."),
)  # fmt: skip

_NODE: Final = (
    Reason("KVPoolNode", ("AgentConnected", "Ready"), "True", "Serving", _GOOD, "The agent serves engines."),
    Reason("KVPoolNode", ("AgentConnected", "Ready"), "False", "LeaseExpired", _BROKEN,
           "The agent is silent: it has ended, or does not reach the API server. Engines there compute.",
           "kubectl -n SYSTEM get pods -l kvstrata.io/pool=POOL -o wide --field-selector spec.nodeName=NODE"),
    Reason("KVPoolNode", ("Ready",), "False", "NoMemoryTier", _BROKEN,
           "No tier is up that engines can exchange blocks through; the message has why, tier by tier.", _AGENT_LOG),
    Reason("KVPoolNode", ("Ready",), "False", "Draining", _PASSING, "The agent moves its blocks, and takes none."),
    Reason("KVPoolNode", ("Ready", "Draining"), "False", "Released", _PASSING,
           "The pool is deleted: memory is given back, what outlives a restart stays."),
    Reason("KVPoolNode", ("Ready", "Draining"), "False", "Destroyed", _PASSING,
           "The pool is deleted: nothing of it is left on the node."),
    Reason("KVPoolNode", ("TierReady",), "True", "AllTiersReady", _GOOD,
           "Every tier is up; the message says which has less than was asked for, such as smaller pages."),
    Reason("KVPoolNode", ("TierReady",), "False", "TierFailed", _BROKEN,
           "A tier cannot be opened or was taken out, by the message; it is tried again, and the others serve.",
           _AGENT_LOG),
    Reason("KVPoolNode", ("HugepagesReserved",), "True", "Reserved", _GOOD, "Tiers have their huge pages."),
    Reason("KVPoolNode", ("HugepagesReserved", "DevicePresent"), "True", "NotRequested", _GOOD,
           "No tier asks for any."),
    Reason("KVPoolNode", ("HugepagesReserved",), "False", "NeedsReboot", _WARNING,
           "The kernel has no such pages, or can have them at boot alone.",
           "boot NODE with what the message says, or ask for pageSize 2Mi or 4Ki"),
    Reason("KVPoolNode", ("HugepagesReserved",), "False", "InsufficientMemory", _WARNING,
           "So many huge pages would leave a NUMA node too little memory.", "smaller tiers, or pageSize 4Ki"),
    Reason("KVPoolNode", ("HugepagesReserved",), "False", "Fragmented", _WARNING,
           "The kernel finds no more memory in one piece.", "reboot NODE: node preparation reserves early"),
    Reason("KVPoolNode", ("HugepagesReserved",), "False", "NotPrepared", _WARNING,
           "Nobody has reserved the pages, and node preparation does not run or may not.",
           "helm upgrade kvstrata CHART -n SYSTEM --reuse-values --set nodePreparation.enabled=true"),
    Reason("KVPoolNode", ("HugepagesReserved",), "False", "KubeletStale", _WARNING,
           "The machine has the pages; its kubelet, which looks when it starts, does not offer them.",
           "restart the kubelet of NODE: systemctl restart kubelet"),
    Reason("KVPoolNode", ("HugepagesReserved",), "False", "NotReserved", _WARNING,
           "A tier has other pages than it asked for, by the message.",
           "reserve pages on NODE (docs/nodes.md), or ask for pageSize 4Ki"),
    Reason("KVPoolNode", ("DevicePresent",), "True", "Present", _GOOD, "What tiers are over is there."),
    Reason("KVPoolNode", ("DevicePresent",), "False", "DeviceMissing", _BROKEN,
           "The machine, or the agent's image, lacks what a tier needs: a GPU, a DAX device, a file system.",
           "another spec.nodeSelector, or what the message names on NODE"),
    Reason("KVPoolNode", ("DevicePresent",), "False", "DeviceFailed", _BROKEN,
           "One of a tier's devices is out; blocks on it are misses, the others serve.",
           "replace the device of NODE that the message names"),
    Reason("KVPoolNode", ("DevicePresent",), "False", "NotPermitted", _BROKEN,
           "The kernel forbids node preparation to change a DAX device.",
           "kubectl -n SYSTEM logs daemonset/kvstrata-node --tail=50"),
    Reason("KVPoolNode", ("DevicePresent",), "False", "Busy", _BROKEN,
           "A DAX device is in use, so its mode cannot be changed.", "end what the message names on NODE"),
    Reason("KVPoolNode", ("DevicePresent",), "False", "WrongMode", _BROKEN,
           "A DAX device has another mode than the tier asks for.",
           "name the device in nodePreparation.dax.devices, or change it on NODE with daxctl reconfigure-device"),
    Reason("KVPoolNode", ("DevicePresent",), "False", "Absent", _BROKEN,
           "The node has no DAX device, or too few.", "another spec.nodeSelector, or mode Emulated"),
    Reason("KVPoolNode", ("MetadataAvailable",), "True", "DirectoryAnswers", _GOOD, "The agent reaches Redis."),
    Reason("KVPoolNode", ("MetadataAvailable",), "True", "NotUsed", _GOOD,
           "There are no other agents to share locations with."),
    Reason("KVPoolNode", ("MetadataAvailable",), "False", "DirectoryAway", _WARNING,
           "Redis does not answer the agent: the node serves its own blocks, those of others are misses.", _REDIS_LOG),
    Reason("KVPoolNode", ("MetadataAvailable",), "False", "DirectoryPartlyAway", _WARNING,
           "Some primary of a Redis Cluster does not answer; its blocks on other nodes are misses.",
           "look at the Redis Cluster that spec.metadata.redis.external of the pool names"),
    Reason("KVPoolNode", ("MetadataAvailable",), "False", "DirectoryFull", _WARNING,
           "Redis has no memory left: other nodes do not learn what this one stores.", _REDIS_MEMORY),
    Reason("KVPoolNode", ("StoresKeepUp",), "True", "KeepUp", _GOOD, "Object stores take what they are asked for."),
    Reason("KVPoolNode", ("StoresKeepUp",), "False", "Throttled", _WARNING,
           "An object store has refused requests (429, 503) for half a minute; it gets fewer at once.",
           "ask for more requests of the bucket; docs/runbooks/KvstrataObjectStoreRefuses.md"),
    Reason("KVPoolNode", ("CapacitySatisfied",), "True", "Satisfied", _GOOD, "Tiers have what they declare."),
    Reason("KVPoolNode", ("CapacitySatisfied",), "False", "InsufficientCapacity", _BROKEN,
           "A tier got less than it declares; the message has the numbers.",
           "smaller tiers (capacityPerNode), or more of the medium on NODE"),
    Reason("KVPoolNode", ("TiersSettled",), "True", "Settled", _GOOD, "No tier goes or shrinks."),
    Reason("KVPoolNode", ("TiersSettled",), "False", "RemovingTier", _PASSING,
           "A tier goes; its blocks move to others first."),
    Reason("KVPoolNode", ("TiersSettled",), "False", "ShrinkingTier", _PASSING,
           "A tier shrinks; blocks without room move to others first."),
    Reason("KVPoolNode", ("CalibrationCurrent",), "True", "NotCalibrated", _GOOD, "The pool has no calibration."),
    Reason("KVPoolNode", ("CalibrationCurrent",), "True", "NothingStored", _GOOD,
           "Nothing was packed yet by the pool's calibration."),
    Reason("KVPoolNode", ("CalibrationCurrent",), "True", "Holds", _GOOD, "Blocks are as the calibration expects."),
    Reason("KVPoolNode", ("CalibrationCurrent",), "False", "Drifted", _WARNING,
           "Many planes need a safer form than the calibration says, so less is saved.",
           "kvstrata calibrate with newer KV, and apply what it prints"),
    Reason("KVPoolNode", ("CacheEffective",), "True", "NothingFound", _GOOD, "The cache brings what it should."),
    Reason("KVPoolNode", ("CacheEffective",), "False", "Thrashing", _WARNING,
           "Blocks are brought up and leave again before another use: the fastest tier is too small.",
           "a larger memory tier; docs/runbooks/KvstrataCacheIneffective.md"),
    Reason("KVPoolNode", ("CacheEffective",), "False", "Polluted", _WARNING,
           "Nearly all that is stored leaves and was never read.", "docs/runbooks/KvstrataCacheIneffective.md"),
    Reason("KVPoolNode", ("CacheEffective",), "False", "RecomputesAll", _WARNING,
           "Blocks that are here are hardly ever handed out: engines compute them again.",
           "docs/runbooks/KvstrataCacheIneffective.md"),
    Reason("KVPoolNode", ("CacheEffective",), "False", "TierTooLow", _WARNING,
           "Blocks are read from a slower tier that left the fastest one a moment before.",
           "a larger memory tier; docs/runbooks/KvstrataCacheIneffective.md"),
    Reason("KVPoolNode", ("ModelsStaged",), "True", "NotRequested", _GOOD, "No KVModelCache wants weights here."),
    Reason("KVPoolNode", ("ModelsStaged",), "True", "Staged", _GOOD,
           "All weights are here that no KVModelCache's idle time let go of; the message names those."),
    Reason("KVPoolNode", ("ModelsStaged",), "False", "Staging", _PASSING, "Files of some models are on their way."),
    Reason("KVPoolNode", ("ModelsStaged",), "False", "SourceAway", _BROKEN,
           "A model's source does not answer, or is not mounted in the agent's pod; it is tried again.", _AGENT_LOG),
    Reason("KVPoolNode", ("ModelsStaged",), "False", "SourceChanged", _WARNING,
           "Files of the source became others while they were read; it is tried again.", _AGENT_LOG),
    Reason("KVPoolNode", ("ModelsStaged",), "False", "SourceInvalid", _BROKEN,
           "A name, a listing or a safetensors header at the source is not what it has to be; the message names it.",
           "put the file that the message names right at the source"),
    Reason("KVPoolNode", ("ModelsStaged",), "False", "DigestMismatch", _BROKEN,
           "Bytes or listing of the source are not those of the digest; none of them was staged.",
           "correct spec.digest of the KVModelCache, or its source"),
    Reason("KVPoolNode", ("ModelsStaged",), "False", "TooLarge", _BROKEN,
           "A model is larger than its tier less the sixteenth that KV keeps.", "a larger tier (capacityPerNode)"),
    Reason("KVPoolNode", ("ModelsStaged",), "False", "NoRoom", _BROKEN,
           "Other models fill the tier, and are in use or not idle for long enough.",
           "a larger tier (capacityPerNode), or fewer models on NODE"),
    Reason("KVPoolNode", ("ModelsStaged",), "False", "DiskFull", _BROKEN,
           "The tier's file system has no room for what the tier may hold; it goes on when there is.",
           "free space on the file system of the tier's directory, a tmpfs for memory"),
    Reason("KVPoolNode", ("ModelsStaged",), "False", "DiskFailed", _BROKEN,
           "The tier's file system returned an error, which the message has.", _AGENT_LOG),
    Reason("KVPoolNode", ("ModelsStaged",), "False", "TierAbsent", _BROKEN,
           "The tier that is to hold a model is not up on this node.", _AGENT_LOG),
    Reason("KVPoolNode", ("ModelsStaged",), "False", "Unsupported", _BROKEN,
           "The tier or the source holds no weights here, by the message: its type, or memory without a tmpfs.",
           "correct the field that the message names, or agent.hostPaths.memory of the chart (docs/models.md)"),
    Reason("KVPoolNode", ("ModelsStaged",), "False", "Internal", _BROKEN,
           "An unforeseen failure; the log has the trace.", _AGENT_LOG),
    Reason("KVPoolNode", ("ModelsStaged",), "False", "UnknownOrder", _BROKEN,
           "The agent cannot read what a newer operator wants.", _TEMPLATE),
    Reason("KVPoolNode", ("Draining",), "False", "NotRequested", _GOOD, "Nobody has asked for it."),
    Reason("KVPoolNode", ("Draining",), "True", "MovingBlocks", _PASSING,
           "Blocks that are in memory alone move to where they outlive the agent."),
    Reason("KVPoolNode", ("Draining",), "True", "DeadlinePassed", _WARNING,
           "The time for draining is over and blocks are still in memory alone; they are given up.",
           "a longer updateStrategy.drain.timeoutSeconds of the pool, or a tier that outlives the agent"),
    Reason("KVPoolNode", ("Draining",), "True", "RemovingTiers", _PASSING, "Tiers of a deleted pool are taken down."),
    Reason("KVPoolNode", ("Draining",), "False", "Drained", _GOOD,
           "Every block that can outlive the agent has a copy that does."),
)  # fmt: skip

_TENANT: Final = (
    Reason("KVTenant", ("Accepted",), "True", "Accepted", _GOOD, "The spec is valid."),
    Reason("KVTenant", ("Accepted",), "False", "Invalid", _BROKEN,
           "The spec contradicts itself or a limit; engines of the tenant are refused.", _EDIT),
    Reason("KVTenant", ("Accepted",), "False", "IdentityConflict", _BROKEN,
           "Another tenant claims the same ServiceAccount or namespace, so neither gets it: its engines are refused.",
           "kubectl edit kvtenant NAME: take the identity that the message names out of one of them"),
    Reason("KVTenant", ("Accepted",), "False", "UnknownPool", _BROKEN, "A quota names a KVPool that is not there.",
           "kubectl edit kvtenant NAME: correct the quota that the message names"),
    Reason("KVTenant", ("Accepted",), "False", "UnknownTier", _BROKEN,
           "A quota names a tier that its pool has not.",
           "kubectl edit kvtenant NAME: correct the quota that the message names"),
    Reason("KVTenant", ("Ready",), "True", "Ready", _GOOD, "The tenant has a key, and shares what it asks to share."),
    Reason("KVTenant", ("Ready",), "False", "NotAccepted", _ECHO, "See Accepted.", _EDIT),
    Reason("KVTenant", ("Ready",), "False", "KeyMissing", _BROKEN,
           "The Secret with the tenant's key is not there yet, or is not ours; its engines are refused.",
           _OPERATOR_LOG),
    Reason("KVTenant", ("Ready",), "False", "UnknownDomain", _WARNING,
           "spec.trustDomain names a KVTrustDomain that is not there; blocks stay private.",
           "kubectl get kvtrustdomains, and correct spec.trustDomain or create it"),
    Reason("KVTenant", ("Ready",), "False", "NotAdmitted", _WARNING,
           "The KVTrustDomain does not list the tenant; blocks stay private.",
           "kubectl edit kvtrustdomain DOMAIN: add NAME to spec.tenants"),
    Reason("KVTenant", ("QuotaEnforced",), "True", "Enforced", _GOOD, "Quotas are kept on every node."),
    Reason("KVTenant", ("QuotaEnforced",), "False", "OverHard", _WARNING,
           "The tenant holds more than a hard quota on some nodes; nothing more is stored for it there.",
           "kubectl edit kvtenant NAME: a larger quota, or wait until blocks have left"),
    Reason("KVTenant", ("OverQuota",), "True", "OverHard", _ECHO, "See QuotaEnforced.",
           "kubectl edit kvtenant NAME"),
    Reason("KVTenant", ("QuotaEnforced",), "False", "OverGuarantee", _WARNING,
           "Guarantees of all tenants are more than some node has.",
           "kubectl edit kvtenant NAME: smaller guarantees, or larger tiers of the pool"),
    Reason("KVTenant", ("OverQuota",), "False", "WithinHard", _GOOD, "No node reports more than a hard quota."),
    Reason("KVTenant", ("EraseCompleted",), "False", "InProgress", _PASSING,
           "Agents that the message names have not confirmed yet.", "docs/runbooks/KvstrataEraseWaits.md"),
    Reason("KVTenant", ("EraseCompleted",), "True", "Erased", _GOOD, "Everything from before can be read by nobody."),
    Reason("KVTenant", ("EraseCompleted",), "True", "NodesAway", _WARNING,
           "Erased; nodes without an agent hold bytes that cannot be read, and are dropped when they come back.",
           "bring the agents of these nodes back, or wipe their disks"),
)  # fmt: skip

_DOMAIN: Final = (
    Reason("KVTrustDomain", ("Accepted",), "True", "Accepted", _GOOD, "The spec is valid."),
    Reason("KVTrustDomain", ("Accepted",), "False", "Invalid", _BROKEN,
           "The spec contradicts itself or a limit; nobody shares by it.", _EDIT),
    Reason("KVTrustDomain", ("Ready",), "True", "Ready", _GOOD, "The domain has a key."),
    Reason("KVTrustDomain", ("Ready",), "False", "NotAccepted", _ECHO, "See Accepted.", _EDIT),
    Reason("KVTrustDomain", ("Ready",), "False", "KeyMissing", _BROKEN,
           "The Secret with the domain's key is not there yet, or is not ours.", _OPERATOR_LOG),
    Reason("KVTrustDomain", ("MembersAgreed",), "True", "Agreed", _GOOD, "Domain and tenants name each other."),
    Reason("KVTrustDomain", ("MembersAgreed",), "False", "OneSided", _WARNING,
           "A tenant is named by the domain and does not join, or joins and is not named; it shares nothing.",
           "kubectl edit kvtrustdomain NAME: spec.tenants as the message says, or spec.trustDomain of the tenant"),
)  # fmt: skip

_SHARE: Final = (
    Reason("KVPrefixShare", ("Accepted",), "True", "Accepted", _GOOD, "The spec is valid."),
    Reason("KVPrefixShare", ("Accepted", "Active"), "False", "Invalid", _BROKEN,
           "The spec contradicts itself or a limit; nobody may read by it.", _EDIT),
    Reason("KVPrefixShare", ("Accepted", "Active"), "False", "UnknownPool", _BROKEN,
           "spec.poolRef names a KVPool that is not there.",
           "kubectl -n NAMESPACE edit kvprefixshare NAME: correct spec.poolRef"),
    Reason("KVPrefixShare", ("Accepted", "Active"), "False", "NotGranted", _BROKEN,
           "The share's namespace belongs to no tenant, or to several, so nobody grants it.",
           "kubectl get kvtenants -o yaml: exactly one must claim namespace NAMESPACE"),
    Reason("KVPrefixShare", ("Active",), "True", "Granted", _GOOD, "The readers in the message may read."),
    Reason("KVPrefixShare", ("Active",), "False", "KeyMissing", _BROKEN,
           "The Secret with the share's key is not there yet, or is not ours.", _OPERATOR_LOG),
    Reason("KVPrefixShare", ("Active",), "False", "NoReader", _BROKEN, "Nobody whom spec.to names may read.",
           "kvstrata who-can-read says why for each"),
    Reason("KVPrefixShare", ("Active",), "False", "Expired", _WARNING, "spec.expiresAt has passed; nobody reads by it.",
           "kubectl -n NAMESPACE delete kvprefixshare NAME, or a later spec.expiresAt"),
    Reason("KVPrefixShare", ("Active",), "False", "TooManyShares", _WARNING,
           "The granting tenant has more than 64 shares in the pool; those behind the 64th by name are not written.",
           "kubectl -n NAMESPACE delete kvprefixshare NAME, or another share of that tenant"),
    Reason("KVPrefixShare", ("Expired",), "True", "Expired", _ECHO, "See Active.",
           "kubectl -n NAMESPACE delete kvprefixshare NAME, or a later spec.expiresAt"),
    Reason("KVPrefixShare", ("Expired",), "False", "NotExpired", _GOOD, "The message says until when it lasts."),
    Reason("KVPrefixShare", ("ReadersAgreed",), "True", "Agreed", _GOOD, "Everybody whom spec.to names may read."),
    Reason("KVPrefixShare", ("ReadersAgreed",), "False", "UnknownReader", _WARNING,
           "spec.to names a tenant or a domain that is not there.",
           "kubectl -n NAMESPACE edit kvprefixshare NAME: correct spec.to"),
    Reason("KVPrefixShare", ("ReadersAgreed",), "False", "NotAccepted", _WARNING,
           "A reader does not accept shares of the granting tenant.",
           "kubectl edit kvtenant READER: add the granting tenant to spec.acceptSharesFrom"),
    Reason("KVPrefixShare", ("ReadersAgreed",), "False", "DomainPrivate", _WARNING,
           "A domain that spec.to names has spec.sharing Private.",
           "kubectl edit kvtrustdomain DOMAIN: another spec.sharing, or name its tenants"),
    Reason("KVPrefixShare", ("ReadersAgreed",), "False", "TooManyShares", _WARNING,
           "A reader gets 64 shares of the pool, its own first, then by name; this one is not among them.",
           "kubectl -n NAMESPACE edit kvprefixshare NAME: prefixes of several shares in one, or fewer readers"),
)  # fmt: skip

_REFUSED: Final = ("Accepted", "Progressing")
"""An operation's conditions while it cannot be worked on; it ends by its own deadline."""

_OPERATION: Final = (
    Reason("KVOperation", ("Accepted",), "True", "Accepted", _GOOD, "The operation has been taken up."),
    Reason("KVOperation", ("Accepted",), "False", "Invalid", _ECHO, "See Failed.", _EDIT),
    Reason("KVOperation", ("Failed",), "True", "Invalid", _BROKEN, "The spec contradicts itself or a limit.", _EDIT),
    Reason("KVOperation", _REFUSED, "False", "NoNodes", _BROKEN, "spec names none of the pool's nodes.",
           "kubectl get kvpoolnodes, and name nodes of pool POOL"),
    Reason("KVOperation", _REFUSED, "False", "PoolNotFound", _BROKEN,
           "A pool that spec names is not there, or not accepted.", "kubectl get kvpools, and name one that is there"),
    Reason("KVOperation", _REFUSED, "False", "PoolDeleting", _BROKEN, "A pool that spec names is being deleted.",
           "kubectl delete kvoperation NAME"),
    Reason("KVOperation", _REFUSED, "False", "PoolPaused", _WARNING,
           "A pool that spec names is paused; the operation goes on when it is not.",
           "kubectl patch kvpool POOL --type=merge -p '{\"spec\":{\"paused\":false}}'"),
    Reason("KVOperation", _REFUSED, "False", "TierNotFound", _BROKEN, "A pool has no tier of that name.",
           "kubectl delete kvoperation NAME, and name a tier of the pool"),
    Reason("KVOperation", _REFUSED, "False", "TenantNotFound", _BROKEN,
           "The tenant that spec names is not there, or not accepted.",
           "kubectl get kvtenants, and name one that is accepted"),
    Reason("KVOperation", _REFUSED, "False", "TenantDeleting", _BROKEN,
           "The tenant that spec names is being deleted, which erases it anyway.", "kubectl delete kvoperation NAME"),
    Reason("KVOperation", _REFUSED, "False", "NoTargets", _BROKEN, "The pool of spec.migrate.to has no nodes.",
           "kubectl get kvpools, and bring nodes to it"),
    Reason("KVOperation", _REFUSED, "False", "LayoutMismatch", _BROKEN,
           "The other pool is of another model or layout, so its engines cannot read the blocks.",
           "kubectl delete kvoperation NAME, and migrate to a pool with equal spec.compatibility"),
    Reason("KVOperation", _REFUSED, "False", "NotDurable", _BROKEN,
           "Blocks would go from a tier that survives a restart to none that does.",
           "spec.migrate.keepSource, or a tier of the other pool that survives a restart"),
    Reason("KVOperation", _REFUSED, "False", "NotEncrypted", _BROKEN,
           "Blocks would go from an encrypted tier to one at rest in the clear.",
           "kubectl edit kvpool: encryption for the tier that the message names"),
    Reason("KVOperation", ("Progressing",), "True", "InProgress", _GOOD, "Agents work on it."),
    Reason("KVOperation", ("Progressing",), "False", "Complete", _GOOD, "See Complete."),
    Reason("KVOperation", ("Progressing",), "False", "Cancelled", _GOOD, "See Cancelled."),
    Reason("KVOperation", ("Progressing",), "False", "Failed", _ECHO, "See Failed.",
           "kubectl get kvoperation NAME -o yaml"),
    Reason("KVOperation", ("Complete",), "True", "Done", _GOOD, "Every node is done."),
    Reason("KVOperation", ("Cancelled",), "True", "Cancelled", _GOOD, "spec.cancel ended it; what was done stays."),
    Reason("KVOperation", ("Failed",), "True", "NodesFailed", _BROKEN,
           "Agents have refused, for good; status.failures has the reasons.", "kubectl get kvoperation NAME -o yaml"),
    Reason("KVOperation", ("Failed",), "True", "DeadlineExceeded", _BROKEN,
           "The time of the operation is over before every node was done; status.failures has what is in the way.",
           "kubectl get kvoperation NAME -o yaml; apply it again with a longer spec.timeoutSeconds"),
)  # fmt: skip

_WEIGHTS_FAILURES: Final = "kubectl get kvmodelcache NAME -o yaml: status.failures names nodes and causes"

_MODEL_CACHE: Final = (
    Reason("KVModelCache", ("Accepted",), "True", "Accepted", _GOOD, "The pool and its tier are there."),
    Reason("KVModelCache", ("Accepted",), "False", "Invalid", _BROKEN,
           "The spec contradicts itself or a limit; nobody stages anything for it.", _EDIT),
    Reason("KVModelCache", ("Accepted",), "False", "PoolNotFound", _BROKEN,
           "spec.poolRef names a KVPool that is not there, or not accepted.",
           "kubectl get kvpools, and correct spec.poolRef"),
    Reason("KVModelCache", ("Accepted",), "False", "PoolDeleting", _BROKEN, "The pool is being deleted.",
           "kubectl delete kvmodelcache NAME, or another spec.poolRef"),
    Reason("KVModelCache", ("Accepted",), "False", "TierNotFound", _BROKEN,
           "The pool has no tier of that name, or no NVMe tier where none is named.",
           "kubectl edit kvmodelcache NAME: spec.tier, or a tier of type NVMe for the pool"),
    Reason("KVModelCache", ("Accepted",), "False", "TierUnsuitable", _BROKEN,
           "The tier is of a type, or has pages, that cannot hold weights.",
           "kubectl edit kvmodelcache NAME: another spec.tier, of type NVMe, or HostDRAM with pageSize 4Ki"),
    Reason("KVModelCache", ("Staged", "Progressing"), "False", "NotAccepted", _ECHO, "See Accepted.", _EDIT),
    Reason("KVModelCache", ("Staged", "Progressing"), "False", "NoNodes", _WARNING,
           "spec.nodes means none of the pool's nodes, or the pool has none.",
           "kubectl get kvpoolnodes, and correct spec.nodes"),
    Reason("KVModelCache", ("Staged",), "True", "Staged", _GOOD, "Every node that is meant has all files."),
    Reason("KVModelCache", ("Staged",), "False", "Staging", _PASSING,
           "Copies are missing, and their time is not over; the message counts them."),
    Reason("KVModelCache", ("Staged",), "False", "DeadlineExceeded", _BROKEN,
           "Copies are missing for longer than spec.deadlineSeconds; agents go on.",
           "docs/runbooks/KvstrataModelNotStaged.md"),
    Reason("KVModelCache", ("Staged",), "False", "Evicted", _WARNING,
           "Nodes have removed files that no engine used for spec.idleSeconds, to make room for KV.",
           "a larger tier (capacityPerNode), a longer spec.idleSeconds, or fewer copies"),
    Reason("KVModelCache", ("Progressing",), "True", "Staging", _GOOD, "Agents copy files."),
    Reason("KVModelCache", ("Progressing",), "False", "Complete", _GOOD, "See Staged."),
    Reason("KVModelCache", ("Progressing",), "False", "PoolPaused", _WARNING,
           "The pool is paused: no new orders reach its nodes.",
           "kubectl patch kvpool POOL --type=merge -p '{\"spec\":{\"paused\":false}}'"),
    Reason("KVModelCache", ("Progressing",), "False", "Waiting", _WARNING,
           "No agent is at work: each has refused, is away, or made room for KV.", _WEIGHTS_FAILURES),
)  # fmt: skip

REASONS: Final = (*_POOL, *_NODE, *_TENANT, *_DOMAIN, *_SHARE, *_OPERATION, *_MODEL_CACHE)
"""By kind, then by type of condition."""

TRUE_IS_BAD: Final = frozenset({"Degraded", "OverQuota", "Expired"})
"""Types whose True is bad news; of all others it is False."""


def stated(reason: Reason) -> Iterator[tuple[str, str]]:
    """Types and statuses that a reason is stated with.

    A reason without a status of its own is bad news: True of the types whose True is bad, and False of all others.
    """
    for type_ in reason.types:
        yield type_, reason.status or ("True" if type_ in TRUE_IS_BAD else "False")


_BY_PLACE: Final = {
    (reason.kind, type_, status, reason.reason): reason for reason in REASONS for type_, status in stated(reason)
}


def find(kind: str, type_: str, status: str, reason: str) -> Reason | None:
    """Look one up; None for what this version does not write."""
    return _BY_PLACE.get((kind, type_, status, reason))
