"""Catalogue of what our processes log at level warning and above: `event` of each line, its fields, what to do.

`docs/logs.md` is made from it, and a test holds it to the code both ways.
"""

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class LogEvent:
    """One kind of line."""

    event: str
    level: str
    """`warning` or `error`; with a traceback where `has_traceback`."""
    processes: tuple[str, ...]
    fields: tuple[str, ...]
    help: str
    """What it means, and what to do."""
    has_traceback: bool = False


_ALL: Final = ("agent", "metadata", "node", "operator")
_CLUSTER: Final = ("agent", "node", "operator")

EVENTS: Final = (
    LogEvent(
        "KEK Secret ignored", "warning", ("agent", "operator"), ("cause",),
        "The Secret of key-encryption keys is malformed; the KEKs of before stay in use. Mend the entry that "
        "`cause` names.",
    ),
    LogEvent(
        "KEK file ignored", "warning", ("agent", "operator"), ("path", "cause"),
        "As above, of `--kek-file`.",
    ),
    LogEvent(
        "a client has changed the size of an extent", "warning", ("agent",), ("extent",),
        "Memory that cannot be sealed was cut short by an engine; its blocks are misses now. Find the engine's "
        "process: nothing of ours does that.",
    ),
    LogEvent(
        "a part of the directory is away", "warning", ("metadata",), ("error",),
        "Some shards of Redis do not answer; the others serve. See the runbook KvstrataDirectoryDown.",
    ),
    LogEvent(
        "action failed", "warning", ("operator",), ("on", "error"),
        "The API server refused a write of the operator; it is tried again with growing pauses. A 403 is a "
        "missing right of the ClusterRole.",
    ),
    LogEvent(
        "agent fenced", "warning", ("metadata",), ("agent", "lease", "incarnation", "silence_s"),
        "An agent was silent for so long that its locations are withdrawn. Look at its node; it announces all "
        "again when it is back.",
    ),
    LogEvent(
        "api server gives no answer", "warning", ("metadata",), ("what", "error"),
        "What is declared is not read again for a while; the last known stays in force.",
    ),
    LogEvent(
        "book of dax devices not written", "warning", ("node",), ("device", "cause"),
        "Node preparation cannot remember that it made a DAX device its own. Is its folder writable?",
    ),
    LogEvent(
        "certificate denied", "warning", ("operator",), ("request", "by", "reason"),
        "A CertificateSigningRequest does not fit its requester. One of ours: its ServiceAccount is wrong; else "
        "somebody tries.",
    ),
    LogEvent(
        "certificate not used", "error", ("agent", "metadata"), ("uri", "cause"),
        "A certificate came that does not fit the key or the authority; the old one stays. The operator issues "
        "another one.",
    ),
    LogEvent(
        "clients use memory that was taken back", "warning", ("agent",), ("bytes",),
        "Engines still have pages mapped that the agent gave to others. They read nothing that is believed, but "
        "the node's memory is not free yet: restart those that do not let go.",
    ),
    LogEvent(
        "connection ended: all places are taken", "warning", ("agent",), ("connections",),
        "More connections than an agent serves; the newest of the tenant with most of them was ended. Look for an "
        "engine that leaks clients.",
    ),
    LogEvent(
        "corrupt block from peer", "warning", ("agent",), ("peer", "block"),
        "Bytes from another node failed their checksum and were dropped. See the runbook KvstrataBlocksCorrupt.",
    ),
    LogEvent(
        "credentials not read again", "warning", _CLUSTER, ("cause",),
        "The kubeconfig or the token's file cannot be read; those of before are used until they end.",
    ),
    LogEvent(
        "data keys are wrapped by a KEK that is not there", "warning", ("operator",), ("kek", "data_keys"),
        "Put the KEK back: blocks under these data keys cannot be opened without it.",
    ),
    LogEvent(
        "dax device not changed", "warning", ("node",), ("device", "cause"),
        "The kernel refused to change a DAX device's mode. Is it in use, or already memory of the system?",
    ),
    LogEvent(
        "declared state not read again", "warning", ("agent",), ("cause",),
        "The API server does not answer; the agent serves by what was declared last.",
    ),
    LogEvent(
        "device cannot be closed", "warning", ("agent",), ("cause",),
        "What lies on a device could not be read, and letting go of it failed as well. It is tried again.",
    ),
    LogEvent(
        "device cannot be opened", "warning", ("agent",), ("device", "cause"),
        "One device of a tier over several is not there; the others serve. See the runbook KvstrataDeviceOut.",
    ),
    LogEvent(
        "device failed", "warning", ("agent",), ("device", "cause"),
        "As above, while it was in use: its blocks are misses.",
    ),
    LogEvent(
        "directory away", "warning", ("agent", "metadata"), ("error",),
        "Redis does not answer: blocks of other nodes are misses until it does. See the runbook "
        "KvstrataDirectoryDown.",
    ),
    LogEvent(
        "directory cannot be used", "error", ("agent",), ("error",),
        "Redis refuses the agent: credentials, TLS or a version that does not fit. Waiting does not mend it.",
    ),
    LogEvent(
        "directory failed", "error", ("agent",), (),
        "A defect of ours in the connection to the directory; the agent goes on without it and tries again. "
        "Please report the traceback.",
        has_traceback=True,
    ),
    LogEvent(
        "duty failed", "warning", _ALL, ("duty", "cause"),
        "One round of something periodic failed and is tried again next time.",
    ),
    LogEvent(
        "duty failed", "error", _ALL, ("duty",),
        "As above, by a defect of ours. Please report the traceback.",
        has_traceback=True,
    ),
    LogEvent(
        "earlier secret unknown", "warning", ("metadata",), ("error",),
        "The Secret of the metadata service's Redis cannot be read, so it starts with a new password; agents "
        "follow.",
    ),
    LogEvent(
        "election", "warning", ("operator", "metadata"), ("error",),
        "The Lease of the leader cannot be read or renewed. While that lasts nobody may lead.",
    ),
    LogEvent(
        "erasure not noted", "warning", ("agent",), ("cause",),
        "`kvstrata up` cannot write down that an erasure is over; the next report does it again. Has the disk of its "
        "state directory room?",
    ),
    LogEvent(
        "event feed ended", "warning", ("operator",), ("why",),
        "kopf has ended and is started again; nothing is lost, because all is listed again.",
    ),
    LogEvent(
        "event not posted", "warning", ("operator",), ("about", "reason", "error"),
        "A Kubernetes Event could not be written; conditions say the same.",
    ),
    LogEvent(
        "events are missing", "warning", ("operator",), ("kind",),
        "A listing showed objects of which no event had come; they are taken in.",
    ),
    LogEvent(
        "files of an extent stay", "warning", ("agent",), ("path", "cause"),
        "A file of lasting memory could not be removed; it takes room until the agent starts again.",
    ),
    LogEvent(
        "heartbeat failed", "warning", ("agent",), ("silent_s", "cause"),
        "The agent's Lease was not renewed. Once it is silent for too long it counts as lost and is fenced.",
    ),
    LogEvent(
        "huge pages not set", "warning", ("node",), ("place", "cause"),
        "The kernel refused to reserve huge pages; condition HugepagesReserved has how many there are.",
    ),
    LogEvent(
        "lease not released", "warning", ("agent", "metadata", "operator"), ("cause", "error"),
        "A stopping process could not give its Lease up; it ends by itself.",
    ),
    LogEvent(
        "leases not listed", "warning", ("operator",), ("error",),
        "Heartbeats of agents cannot be read; none of them counts as lost for that.",
    ),
    LogEvent(
        "leases were not live when they were released", "warning", ("agent",), ("owner", "strays"),
        "An engine held leases for longer than they lived; what it read under them it drops. Is it stopped for "
        "seconds at a time?",
    ),
    LogEvent(
        "mandate refused", "warning", ("metadata",), ("term", "obeyed"),
        "A replica that led before tried to act and Redis obeys a newer one. Nothing to do.",
    ),
    LogEvent(
        "manifest", "warning", ("agent",), ("note",),
        "`kvstrata up`: something in the manifest has no effect without a cluster.",
    ),
    LogEvent(
        "manifest refused; what was declared before goes on", "warning", ("agent",), ("cause",),
        "`kvstrata up`: mend the field that `cause` names.",
    ),
    LogEvent(
        "manifest taken in", "warning", ("agent",), ("generation",),
        "`kvstrata up` follows the changed manifest.",
    ),
    LogEvent(
        "many dead agents; the next sweep goes on with their locations", "warning", ("metadata",), (),
        "More than one sweep withdraws at a time; no action.",
    ),
    LogEvent(
        "memory stays", "warning", ("agent",), ("path", "cause"),
        "Lasting memory of a pool or a tier that is gone could not be removed. Remove the file by hand.",
    ),
    LogEvent(
        "model failed", "error", ("agent",), ("model",),
        "A defect of ours ended a staging; it is tried again. Please report the traceback.",
        has_traceback=True,
    ),
    LogEvent(
        "model not staged", "warning", ("agent",), ("model", "reason", "cause"),
        "Weights of a KVModelCache could not be staged; status.models of the KVPoolNode has the same. Tried again.",
    ),
    LogEvent(
        "model order cannot be read", "warning", ("agent",), ("cause",),
        "A newer operator wants something of weights that this agent does not know, and does not say of which model.",
    ),
    LogEvent(
        "much to erase; the next round goes on with it", "warning", ("metadata",), (),
        "Locations of deleted tenants, or under keys that have moved on, take longer than a round; nobody finds them.",
    ),
    LogEvent(
        "no certificate", "warning", ("agent", "metadata"), ("uri", "failures", "cause"),
        "The process has no certificate yet, or could not renew it. See the runbook KvstrataCertificateEnding.",
    ),
    LogEvent(
        "no certificates are issued", "warning", ("operator",), ("cause",),
        "The operator's authority cannot be read or written; agents keep the certificates that they have.",
    ),
    LogEvent(
        "no data key: blocks stay off encrypted tiers", "warning", ("agent",), ("secret", "entry", "cause"),
        "A scope's data key cannot be opened. `cause` says whether the KEK or the entry is missing.",
    ),
    LogEvent(
        "no descriptor for a connection", "warning", ("agent",), ("cause",),
        "The process has no file descriptor left: raise its limit, or look for what holds them.",
    ),
    LogEvent(
        "no token is taken", "warning", ("agent",), ("cause",),
        "`kvstrata up`: a file of tokens cannot be used, so nobody is let in by tokens.",
    ),
    LogEvent(
        "object cannot be read", "warning", _CLUSTER, ("path", "cause"),
        "An object of ours does not fit its schema and is left out. Was it written past the API server's "
        "validation?",
    ),
    LogEvent(
        "object ignored", "warning", _CLUSTER, ("kind", "name_", "cause"),
        "As above, by name.",
    ),
    LogEvent(
        "offload engine given up", "error", ("agent",), ("engine", "cause"),
        "The offload library did not do what its interface promises; the processor does all from here on, and nothing "
        "is lost. Restart the agent to try the library again; `kvstrata conformance --offload` says what is wrong "
        "with it.",
    ),
    LogEvent(
        "offload engine is emulated", "warning", ("agent",), ("engine",),
        "The library plays a device: what it does says nothing about how fast a real one is.",
    ),
    LogEvent(
        "old index cannot be closed", "warning", ("agent",), ("cause",),
        "The index of a file tier that another one has replaced. Nothing is lost; the medium may be failing.",
    ),
    LogEvent(
        "order failed", "error", ("agent",), ("order",),
        "A defect of ours ended this node's part of a KVOperation. Please report the traceback.",
        has_traceback=True,
    ),
    LogEvent(
        "order refused", "warning", ("agent",), ("order", "cause"),
        "This node cannot do its part of a KVOperation; the operation's status has the same reason.",
    ),
    LogEvent(
        "peer conversation failed", "error", ("agent",), (),
        "A defect of ours ended a connection with another node, whose blocks are misses meanwhile. Please report "
        "the traceback.",
        has_traceback=True,
    ),
    LogEvent(
        "peer question failed", "error", ("agent",), (),
        "As above, of one question.",
        has_traceback=True,
    ),
    LogEvent(
        "peer refused", "warning", ("agent",), ("peer", "error"),
        "Somebody asked for blocks as another agent and could not prove it. After a change of certificates it "
        "passes; else find who it is.",
    ),
    LogEvent(
        "pooled memory has failed", "error", ("agent",), ("path", "error"),
        "The head of a CXL device that nodes share cannot be read any more, so who has which slice is not known: this "
        "node's tier there is given up and its blocks are misses. Look for memory errors of the device.",
    ),
    LogEvent(
        "read of a shared tier failed", "error", ("agent",), ("block",),
        "A record on shared flash could not be read here; the block is a miss.",
        has_traceback=True,
    ),
    LogEvent(
        "redis ended", "error", ("metadata",), ("restarts",),
        "The metadata service's own Redis ended and is started again. Is it killed for memory? See the runbook "
        "KvstrataRedisDown.",
    ),
    LogEvent(
        "redis keeps its old certificates", "warning", ("metadata",), ("error",),
        "Redis refused new certificates; the old ones end some day. See the runbook KvstrataCertificateEnding.",
    ),
    LogEvent(
        "request failed", "error", ("agent",), ("verb",),
        "A defect of ours in one request of an engine, which sees a miss. Please report the traceback.",
        has_traceback=True,
    ),
    LogEvent(
        "request not answered", "warning", ("operator",), ("request", "error"),
        "A certificate that was signed could not be written into its request; tried again.",
    ),
    LogEvent(
        "resync failed", "warning", ("operator",), ("error",),
        "A listing failed; the next one is due in a while.",
    ),
    LogEvent(
        "round failed", "error", ("metadata",), (),
        "A defect of ours ended one round of the metadata service; the next one is due. Please report the "
        "traceback.",
        has_traceback=True,
    ),
    LogEvent(
        "sealed blocks that waited for their key not entered", "warning", ("agent",), ("tier", "tag", "cause"),
        "Their key is there now, and the tier's medium fails: they stay misses, and are tried again every second.",
    ),
    LogEvent(
        "sealed blocks wait for their key", "warning", ("agent",), ("tier", "tag", "cause"),
        "Blocks of an earlier run cannot be opened yet. They are served once their scope's key is there, and "
        "removed when it never comes.",
    ),
    LogEvent(
        "secret not written", "warning", ("metadata",), ("error",),
        "Agents cannot learn how to reach Redis. Is the service's right to its Secret missing?",
    ),
    LogEvent(
        "sessions cannot be remembered", "warning", ("agent",), ("path", "cause"),
        "The journal of sessions cannot be written: after a restart they begin anew.",
    ),
    LogEvent(
        "slices of pooled memory have another owner", "warning", ("agent",), ("path", "slices"),
        "This process stood still for more than 10 s, and another node took so many slices of the CXL device that they "
        "share; their blocks are misses, other slices are claimed. Find out what stopped the agent.",
    ),
    LogEvent(
        "status not written", "warning", ("agent", "node"), ("cause", "failures", "pool_node"),
        "What this node observed did not reach the API server; tried again.",
    ),
    LogEvent(
        "task failed", "error", _ALL, ("task",),
        "A defect of ours ended something in the background. Please report the traceback.",
        has_traceback=True,
    ),
    LogEvent(
        "tier failed", "warning", ("agent",), ("tier", "cause"),
        "A tier could not be opened or was taken out; the condition of the node has the reason, and it is tried "
        "again.",
    ),
    LogEvent(
        "tier failed", "error", ("agent",), ("tier",),
        "As above, by a defect of ours. Please report the traceback.",
        has_traceback=True,
    ),
    LogEvent(
        "token believed without review", "warning", ("agent",), ("cause",),
        "The API server could not review an engine's token, which was reviewed not long ago: it is let in once "
        "more.",
    ),
    LogEvent(
        "token not renewed", "warning", _CLUSTER, ("cause",),
        "The token's file could not be read again; the old token is used until it ends.",
    ),
    LogEvent(
        "uploads of an earlier run cannot be aborted", "warning", ("agent",), ("prefix", "cause"),
        "Parts of uploads stay in the bucket. Give it a lifecycle rule that aborts unfinished uploads.",
    ),
    LogEvent(
        "watch broken", "warning", _CLUSTER, ("path", "failures", "cause"),
        "The API server ended a watch; everything is listed and watched again.",
    ),
    LogEvent(
        "weights not counted", "warning", ("agent",), ("tier", "cause"),
        "Files of weights in a tier cannot be looked at: KV goes on with the room that it has. Is the medium failing?",
    ),
    LogEvent(
        "weights not tended", "warning", ("agent",), ("tier", "cause"),
        "Files of weights in a tier cannot be looked at or removed: what is idle there stays for now. Is the medium "
        "failing?",
    ),
    LogEvent(
        "weights on their way not removed", "warning", ("agent",), ("tier", "cause"),
        "Files of a staging that nobody wants any more stay. They go with a later try, or at the next start.",
    ),
    LogEvent(
        "wrong bytes from peer", "warning", ("agent",), ("peer", "model"),
        "Weights that another agent sent are not those of their digest; they were not taken, it is not asked again.",
    ),
)  # fmt: skip
"""In alphabetical order."""
