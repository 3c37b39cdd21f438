"""The local protocol between a client and its agent: msgpack frames over a unix socket. Pure.

A frame is a 4-byte big-endian length and one msgpack array, tagged with the verb. File descriptors of extents
travel beside a reply as SCM_RIGHTS, in the order of `extents`. Requests carry an id that the reply repeats, so a
connection may have several requests under way. Verbs are batched: one frame speaks of up to `KEYS_MAX` blocks,
whose digests are joined into one byte string. In a hand-over a reader on another node has blocks part by part, layer by
layer, while they are computed.
"""

from enum import StrEnum
from typing import Annotated, Final, get_args

import msgspec

from kvstrata_api.blocks import KEY_BYTES, Layout
from kvstrata_api.decoding import UNDECODABLE
from kvstrata_api.errors import InvalidInputError
from kvstrata_api.names import NamedPrefix
from kvstrata_api.trace_context import TRACEPARENT_CHARS

PROTOCOL_VERSION: Final = 1
FRAME_BYTES_MAX: Final = 4 << 20
"""Largest frame: 65,536 keys and their answers fit with room to spare."""
KEYS_MAX: Final = 65_536
PARTS_MAX: Final = 8_192
"""Parts of one block: 128 KiB of checksums."""
PART_SUMS_BYTES_MAX: Final = 2 << 20
"""Checksums of parts in one frame; leases that would be over it are not given."""
SESSION_CHARS_MAX: Final = 128
WINDOW_TOKENS_MAX: Final = 1 << 24
"""Of a window, and of sinks: above every context there is, below what would be a mistake in the unit."""
CLIENT_CHARS_MAX: Final = 256
LEASES_MAX: Final = 2 * KEYS_MAX
"""Leases that one frame may end: all that a connection can have."""
FDS_PER_FRAME_MAX: Final = 64
"""SCM_MAX_FD is 253 on Linux; smaller batches keep one slow frame from holding many descriptors."""
HANDOVER_CHARS_MAX: Final = 128
DEVICES_MAX: Final = 64
"""Devices that one client may open: four times what one machine has."""

Seconds = Annotated[float, msgspec.Meta(ge=-1e9, le=1e9)]
"""A duration that can be compared: what is not a number would pass every limit, and no lease of it would ever end."""

RATE_MAX: Final = 1e9
"""Tokens a second of an engine, at most."""
QUEUED_MAX: Final = 10**12
"""Tokens or requests that wait, at most."""

_LENGTHS_MAX: Final = {
    "client": CLIENT_CHARS_MAX, "session": SESSION_CHARS_MAX, "leases": LEASES_MAX, "suspects": LEASES_MAX,
    "reservations": KEYS_MAX, "checksums": KEYS_MAX, "handover": HANDOVER_CHARS_MAX, "sums": KEYS_MAX,
    "traceparent": TRACEPARENT_CHARS, "devices": DEVICES_MAX, "extents": KEYS_MAX,
}  # fmt: skip


class Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Anything that travels in a frame."""


class Request(Message, frozen=True, array_like=True, tag=True):
    """A question; the reply repeats `id`."""

    id: int


class Reply(Message, frozen=True, array_like=True, tag=True):
    """An answer to the request of the same id."""

    id: int
    grants_version: int
    """Moves on whenever the caller's scopes may have changed."""


class Handover(msgspec.Struct, frozen=True, array_like=True):
    """Where blocks grow, and under which name; the writer's engine gives it to the reader's."""

    agent: str
    epoch: int
    name: str
    """Chosen by the writer. Whoever may read the scope and knows it may have the blocks before they are whole."""


class Advance(Request, frozen=True, array_like=True, tag=True):
    """Report that parts of growing blocks are filled: the same ones of each, from part `first` on.

    The answer counts the blocks that still grow; the reservations live for their full time again.
    """

    reservations: tuple[int, ...]
    first: int
    sums: tuple[bytes, ...]
    """For each block, joined checksums of the filled parts (`checksum.bind_part`)."""


class Arrive(Request, frozen=True, array_like=True, tag=True):
    """Wait for parts of growing blocks, those behind the first `have` of each."""

    leases: tuple[int, ...]
    have: int
    wait_s: Seconds = 1.0
    """Answered sooner when there are more parts, or none to come."""


class Arrived(Reply, frozen=True, array_like=True, tag=True):
    """Answer to Arrive."""

    parts: int
    """Leading parts that are there, of every block; `have` when none came in time."""
    sums: tuple[bytes, ...]
    """For each lease, joined checksums of the parts behind the first `have`."""


class Hello(Request, frozen=True, array_like=True, tag=True):
    """First frame of a connection."""

    version: int
    client: str
    """Name and version of the client, for logs."""


class Attach(Request, frozen=True, array_like=True, tag=True):
    """Authenticate and name the layout. A second attach renews the token; the layout must stay."""

    token: str
    pool: str
    layout: Layout
    devices: tuple[str, ...] = ()
    """Devices whose memory the client can open, by UUID as torch has it; `emulated` is the double in host memory. For
    `Acquire.in_place`; nothing of any other device is handed out."""


class Scopes(Request, frozen=True, array_like=True, tag=True):
    """Ask for the scopes again, after a reply with a newer `grants_version`."""


class OpenSession(Request, frozen=True, array_like=True, tag=True):
    """Start or revive a session."""

    session: str
    parent: str = ""
    """Session that this one forks from; its blocks are shared, not copied."""
    priority: str = ""
    """`urgent`, `interactive`, `standard`, `batch` or `background`, as far as the tenant may name it: how long its
    blocks stay, and how soon they move, beside others of the tenant. Any other name, and none, counts as `standard`; a
    fork without one has its parent's."""
    sink_tokens: int = 0
    """Leading tokens that every token attends to, beside the window. Only with `window_tokens`."""
    window_tokens: int = 0
    """Tokens before it that a token attends to, 16,777,216 at most: blocks between sinks and window leave first. 0: all
    tokens, or as the session is known; a fork without one has its parent's."""
    anchor_tokens: int = 0
    """Of so many tokens between sinks and window the first block stays as well: those that follow 0, `anchor_tokens`, 2
    `anchor_tokens` and so on, up to whole blocks. The distance doubles whenever they are more than 256. 0: none. Only
    with `window_tokens`."""


class TouchSession(Request, frozen=True, array_like=True, tag=True):
    """State what the session is about to do; by far the most valuable hint to the policy."""

    session: str
    state: str
    """`decoding`, `idle`, or `tool`: idle until a tool has answered."""
    urgency: int = 0
    """0 none to 100 now."""
    expected_return_s: Seconds = 0.0
    """Seconds until the next turn, a week at most; 0 when unknown, which is the pool's `retention.toolGapSeconds` for
    `tool`. Less than 0: it has passed, and nothing is changed."""


class CloseSession(Request, frozen=True, array_like=True, tag=True):
    """End a session; with `archive` its prefix goes to slow tiers instead of away.

    The answer counts 0 for an unknown session, 1 for one that is closed, 2 for one that is archived: every block of its
    prefix has a copy that survives a restart.
    """

    session: str
    archive: bool = True
    deadline_s: Seconds = 0.0
    """How long to wait for the archive before answering; it goes on after that."""


class Retain(Request, frozen=True, array_like=True, tag=True):
    """Keep an idle session from counting as finished, and its blocks expected back, for `for_s` seconds from now.

    Like `Drop` only for agents that name it in `Granted.verbs`. Counts 1, or 0 for an unknown session.
    """

    session: str
    for_s: Seconds


class Lookup(Request, frozen=True, array_like=True, tag=True):
    """How long a prefix of these chained keys can be had? Renews nothing, moves nothing."""

    scope: str
    digests: bytes
    session: str = ""
    is_probe: bool = False
    """True leaves the hit ratio alone: the caller counts its load as a whole, or only wants to write."""
    is_use: bool = True
    """False where the caller only wants to write: what it asks for is not expected sooner for that."""
    traceparent: str = ""
    """Span of the caller, as in `kvstrata_api.trace_context`; the agent's are its children. Empty: it has none."""


class CountLoad(Request, frozen=True, array_like=True, tag=True):
    """Report how a load that leased without a counted lookup ended, for the hit ratio and the account of loads."""

    wanted_blocks: int
    loaded_blocks: int


class Acquire(Request, frozen=True, array_like=True, tag=True):
    """Lease the longest usable prefix of these keys, brought into memory first where it lies lower or elsewhere."""

    scope: str
    digests: bytes
    session: str = ""
    lease_s: Seconds = 30.0
    deadline_s: Seconds = 10.0
    """Blocks that cannot be brought up in time are left out of the answer."""
    part_bytes: int = 0
    """Ask for checksums of the parts of each block, of so many bytes each, so that parts can be read alone. It divides
    the block into `PARTS_MAX` at most. 0: none."""
    handover: Handover | None = None
    """Lease growing blocks of this hand-over and nothing else; their parts are asked for with `Arrive`."""
    traceparent: str = ""
    """As in `Lookup`."""
    in_place: bool = False
    """Lease blocks where they lie in one of the `Attach.devices`, without a copy in host memory: whole blocks of the
    tenant's own scope, as no mapping of such memory can be read-only. All others come as without it."""


class Release(Request, frozen=True, array_like=True, tag=True):
    """End leases. The answer counts those that lived until now; what was read under the others is void.

    Releasing twice is harmless and counts nothing the second time.
    """

    leases: tuple[int, ...]
    suspects: tuple[int, ...] = ()
    """Leases among them whose copy did not match its checksum; the agent checks the block itself."""


class Reserve(Request, frozen=True, array_like=True, tag=True):
    """Ask for slots to fill, one for each key; keys are in chain order."""

    scope: str
    parent: bytes
    """Digest that the first key continues; empty for a root."""
    digests: bytes
    session: str = ""
    handover: str = ""
    """Name under which readers may have the blocks while they grow; empty: nobody sees them before `Publish`."""
    part_bytes: int = 0
    """With `handover`: bytes of the parts that they grow by; as in `Acquire`."""
    traceparent: str = ""
    """As in `Lookup`."""


class Publish(Request, frozen=True, array_like=True, tag=True):
    """Commit filled slots. The agent checks some of the checksums; every reader verifies what it gets against them."""

    reservations: tuple[int, ...]
    checksums: tuple[bytes, ...]
    traceparent: str = ""
    """As in `Lookup`."""


class Abandon(Request, frozen=True, array_like=True, tag=True):
    """Give reservations back unfilled."""

    reservations: tuple[int, ...]


class Prefetch(Request, frozen=True, array_like=True, tag=True):
    """Bring a prefix into memory in the background; answers at once."""

    scope: str
    digests: bytes
    session: str = ""


class Pin(Request, frozen=True, array_like=True, tag=True):
    """Keep blocks in memory until `expires_s` from now; pins always expire."""

    scope: str
    digests: bytes
    expires_s: Seconds


class Unpin(Request, frozen=True, array_like=True, tag=True):
    """Take pins of this connection back."""

    scope: str
    digests: bytes


class Touch(Request, frozen=True, array_like=True, tag=True):
    """Record use of blocks without reading them; answers how many are here. Moves nothing.

    Like `Drop` only for agents that name it in `Granted.verbs`.
    """

    scope: str
    digests: bytes
    session: str = ""
    """That the blocks belong to, in chain order: it follows them as if it had stored them."""


class ReportEngine(Request, frozen=True, array_like=True, tag=True):
    """Report how fast the engine computes and how much waits: loads are weighed against it. Again every 10 s or so.

    Like `Drop` only for agents that name it in `Granted.verbs`. Counts 1; forgotten 30 s later.
    """

    prefill_tokens_per_s: float
    """Of late: over 0, 1e9 at most."""
    queued_tokens: int = 0
    """Prompt tokens of requests that wait to be computed, before what is asked for now: 0 to 1e12."""
    running: int = 0
    """Requests that are being computed: 0 to 1e12."""
    half_rate_tokens: int = 0
    """Behind so many tokens the next one takes twice as long as the first, for attention: 0 (not counted) to 1e12.

    About 6 times the hidden size of a dense transformer: parameters / (2 x layers x hidden size).
    """


class CloseExtents(Request, frozen=True, array_like=True, tag=True):
    """Report that memory of devices is not mapped here any more: only then it may be freed. Counts the extents.

    Like `Drop` only for agents that name it in `Granted.verbs`. Memory of a connection that has ended counts as closed.
    """

    extents: tuple[int, ...]


class Drop(Request, frozen=True, array_like=True, tag=True):
    """Remove blocks of the tenant's own scope from this node, in chain order; answered by `Found`.

    What somebody leases, pins, moves or decodes from stays, and so does what a block continues that stays. The states
    of the answer are those afterwards, on this node alone: MISS for what is not here any more.
    """

    scope: str
    digests: bytes


class Demote(Request, frozen=True, array_like=True, tag=True):
    """Copy blocks of the tenant's own scope to a slower tier soon, and let their memory be the next that is given away.

    In chain order; what somebody holds stays, and so does what another chain or session continues. Counts the blocks.
    Like `Drop` only for agents that name it in `Granted.verbs`.
    """

    scope: str
    digests: bytes


class Fetch(Request, frozen=True, array_like=True, tag=True):
    """Like `Prefetch`, of blocks wherever they are: from other nodes as well. Answered once these are known.

    Like `Drop` only for agents that name it in `Granted.verbs`.
    """

    scope: str
    digests: bytes
    session: str = ""


class Stats(Request, frozen=True, array_like=True, tag=True):
    """Ask for tiers and counters."""


class Explain(Request, frozen=True, array_like=True, tag=True):
    """Ask why a block or session is where it is. Exactly one of digest (with scope) and session is set.

    With a scope alone: what the tenant has there on this node, as a tree. Answered by `Text`: an object of `runs`, of
    which each has its `parent` in the list or -1, `blocks`, `tiers` (blocks by tier), `idle_s` and `sessions`. Of a
    shared scope it has what is on the tenant's own account.
    """

    scope: str = ""
    digest: bytes = b""
    session: str = ""


class WhyMiss(Request, frozen=True, array_like=True, tag=True):
    """Ask why a prompt is not found, or not as a whole: keys of one scope, in chain order. No use of the blocks.

    Answered by `Text`: an object of `blocks`, `hit_blocks` (of the unbroken beginning), `reason` (a word), `said` (a
    sentence), `history` (decisions on the first missing block, the latest first) and `inputs`. A scope that the caller
    may not read, and one in which nothing was ever stored, have one answer.
    """

    scope: str
    digests: bytes


class RouteHint(Request, frozen=True, array_like=True, tag=True):
    """Ask which nodes have most of a prompt: keys of one scope, in chain order. No use of the blocks.

    Answered by `Text`: an object of `blocks`, `is_alone` (other nodes could not be asked), `longest` (name of a node,
    empty where none has any) and `nodes`, those soonest first that have the first block: `node`, `blocks` of the
    unbroken beginning, `seconds` until all is fetched or computed on an idle node, and `media`, blocks by medium.
    """

    scope: str
    digests: bytes


class Welcome(Reply, frozen=True, array_like=True, tag=True):
    """Answer to Hello."""

    version: int
    agent: str
    node: str
    epoch: int


class ScopeGrant(msgspec.Struct, frozen=True, array_like=True):
    """One scope that the caller may read."""

    scope: str
    kind: str
    name: str
    secret: bytes
    can_write: bool
    prefixes: tuple[NamedPrefix, ...] = ()
    """Of a share: the only prompts that its scope is for. Empty for scopes of other kinds, which take any."""


class Granted(Reply, frozen=True, array_like=True, tag=True):
    """Answer to Attach and Scopes: shared scopes first, the order of lookups."""

    tenant: str
    scopes: tuple[ScopeGrant, ...]
    write_scope: str
    block_bytes: int
    slot_bytes: int
    """Distance between slots: block_bytes rounded up to 4 KiB."""
    token_expires_s: float
    """Seconds until the token must be renewed by another Attach."""
    verbs: tuple[str, ...] = ()
    """Verbs that this agent knows and earlier ones of the same protocol do not; those end the connection on them."""


class Outcome(StrEnum):
    """What became of a hint."""

    ACCEPTED = "accepted"
    PARTIAL = "partial"
    """Of a part of it: `count` says of how many blocks; or a session ends and is not archived."""
    REFUSED = "refused"
    """A policy, a right or the state of the blocks stands against it; nothing was changed."""
    EXPIRED = "expired"
    """Its time had passed when it came; nothing was changed."""
    UNKNOWN = "unknown"
    """The agent knows neither the session nor any of the blocks, or does not know the hint, or is away."""


class Done(Reply, frozen=True, array_like=True, tag=True):
    """Answer of verbs that only succeed; `count` is on how many items."""

    count: int = 0
    outcome: str = ""
    """Of a hint (`TouchSession`, `CloseSession`, `Retain`, `Pin`, `Prefetch`, `Fetch`, `Demote`): `accepted`,
    `partial`, `refused`, `expired` or `unknown`. Empty from agents that came before it."""


class Found(Reply, frozen=True, array_like=True, tag=True):
    """Answer to Lookup."""

    states: bytes
    """One `tiers.Lookup` code for each key asked for."""
    prefix_blocks: int
    """Leading blocks that are HIT."""
    places: bytes
    """For each leading block: index of its tier in `tier_names`, plus 128 when it is on another node."""
    tier_names: tuple[str, ...]


class ExtentGrant(msgspec.Struct, frozen=True, array_like=True):
    """An extent new to this connection; its descriptor rides on the same frame."""

    extent: int
    size_bytes: int
    is_writable: bool


class DeviceGrant(msgspec.Struct, frozen=True, array_like=True):
    """An extent in the memory of a device, new to this connection. Whoever opens it can write all of it.

    Its descriptor rides on the same frame, behind those of `extents`: one of CUDA's, or of memory for the double.
    """

    extent: int
    size_bytes: int
    device: str
    """As in `Attach.devices`."""


class Leased(msgspec.Struct, frozen=True, array_like=True):
    """One block that may be read until the lease ends."""

    lease: int
    extent: int
    offset: int
    stamp: int
    checksum: bytes
    source: str
    """Where the block was when asked for: a tier name, or `remote`."""
    epoch: int = 0
    """Epoch that the checksum is bound to; 0: that of the reply. Memory that outlived a restart keeps its old one."""
    parts: bytes = b""
    """Joined checksums of its parts (`checksum.bind_part`), where they were asked for and the agent knows how."""
    is_growing: bool = False
    """Of a hand-over: there is no checksum, and only the parts that `Arrived` named may be read."""
    device_sum: bytes = b""
    """Of a block in a device: 8 B that a copy on the device has to match (`kvstrata_native.devices.block_sum`). Empty:
    the block is in host memory."""


class Acquired(Reply, frozen=True, array_like=True, tag=True):
    """Answer to Acquire: leases of the leading blocks that could be had."""

    blocks: tuple[Leased, ...]
    extents: tuple[ExtentGrant, ...]
    epoch: int
    gone: tuple[int, ...] = ()
    """Extents granted before that have gone for good: to be unmapped."""
    busy_s: float = 0.0
    """Where blocks are left out because the path to them is congested, longer than computing them takes: estimated
    seconds until it is free. 0: there is another reason, or none is left out."""
    devices: tuple[DeviceGrant, ...] = ()
    """Extents in devices, where the request was `in_place`."""


class Slot(msgspec.Struct, frozen=True, array_like=True):
    """Where to write one block; `reservation` 0 means that the block exists already and must not be written."""

    reservation: int
    extent: int
    offset: int
    stamp: int


class Reserved(Reply, frozen=True, array_like=True, tag=True):
    """Answer to Reserve: slots of the leading keys; fewer than asked for when the tier is full."""

    slots: tuple[Slot, ...]
    extents: tuple[ExtentGrant, ...]
    epoch: int
    expires_s: float
    gone: tuple[int, ...] = ()
    """Extents granted before that have gone for good: to be unmapped."""
    handover: Handover | None = None
    """What the reader must name, where a hand-over was asked for, the agent knows how and has room for more of them."""
    busy_s: float = 0.0
    """Where slots are left out because blocks wait to leave the tier: estimated seconds until that path is free."""
    refusal: str = ""
    """Why slots are left out, in words; empty when none is."""


class Published(Reply, frozen=True, array_like=True, tag=True):
    """Answer to Publish: for each reservation 1 published, 2 existed already, 0 refused (expired or corrupt)."""

    results: bytes


class Text(Reply, frozen=True, array_like=True, tag=True):
    """Answer to Stats, Explain, WhyMiss and RouteHint: JSON text."""

    json: str


class Failed(Reply, frozen=True, array_like=True, tag=True):
    """Any verb's failure."""

    code: str
    """Name of a leaf of `kvstrata_api.errors`."""
    message: str
    delay_s: float = 5.0


AnyRequest = (
    Hello | Attach | Scopes | OpenSession | TouchSession | CloseSession | Lookup | CountLoad | Acquire | Release
    | Reserve | Publish | Abandon | Prefetch | Pin | Unpin | Stats | Explain | Advance | Arrive
    | Touch | Drop | ReportEngine | Retain | Demote | Fetch | WhyMiss | RouteHint | CloseExtents
)  # fmt: skip
Traceable = Lookup | Acquire | Reserve | Publish
"""Requests that name the span of their caller."""
AnyReply = Welcome | Granted | Done | Found | Acquired | Reserved | Published | Text | Failed | Arrived
REPLIES: Final[dict[type[Request], type[Reply]]] = {
    Hello: Welcome, Attach: Granted, Scopes: Granted, OpenSession: Done, TouchSession: Done, CloseSession: Done,
    Lookup: Found, CountLoad: Done, Acquire: Acquired, Release: Done, Reserve: Reserved, Publish: Published,
    Abandon: Done, Prefetch: Done, Pin: Done, Unpin: Done, Touch: Done, Drop: Found, Stats: Text, Explain: Text,
    Advance: Done, Arrive: Arrived, ReportEngine: Done, Retain: Done, Demote: Done, Fetch: Done, WhyMiss: Text,
    RouteHint: Text, CloseExtents: Done,
}  # fmt: skip
"""What each request is answered with, or with `Failed`."""
LATER_VERBS: Final = tuple(
    v.__name__ for v in (Touch, Drop, ReportEngine, Retain, Demote, Fetch, WhyMiss, RouteHint, CloseExtents)
)
"""Verbs that came after the first agents of this protocol version."""
GRANTING: Final = (Acquired, Reserved)
"""Replies that may bring extents, with descriptors beside them."""


def descriptors(reply: Reply) -> int:
    """Descriptors that ride on the frame of a reply."""
    devices = reply.devices if isinstance(reply, Acquired) else ()
    extents = reply.extents if isinstance(reply, GRANTING) else ()
    return len(extents) + len(devices)


_LIMITED: Final = {
    kind: tuple((f, _LENGTHS_MAX[f]) for f in kind.__struct_fields__ if f in _LENGTHS_MAX)
    for kind in get_args(AnyRequest)
}


def limits_of(kind: type[Message]) -> tuple[tuple[str, int], ...]:
    """Fields of a request whose lengths have limits, with these; of other messages none."""
    return _LIMITED.get(kind, ())


def outcome_of(count: int, wanted: int) -> Outcome:
    """Outcome of a hint that was carried out for so many of the blocks that it names, in so far as any are known."""
    if count >= wanted:
        return Outcome.ACCEPTED
    return Outcome.PARTIAL if count else Outcome.UNKNOWN


_encoder: Final = msgspec.msgpack.Encoder()
_requests: Final[msgspec.msgpack.Decoder[AnyRequest]] = msgspec.msgpack.Decoder(AnyRequest)
_replies: Final[msgspec.msgpack.Decoder[AnyReply]] = msgspec.msgpack.Decoder(AnyReply)


def within_span(request: AnyRequest, traceparent: str) -> AnyRequest:
    """Have a request name the span of its caller, where it can."""
    if traceparent and isinstance(request, Traceable):
        return msgspec.structs.replace(request, traceparent=traceparent)
    return request


def encode(message: Message) -> bytes:
    """Frame a message. Raises `InvalidInputError` when it is over `FRAME_BYTES_MAX`."""
    body = _encoder.encode(message)
    if len(body) > FRAME_BYTES_MAX:
        raise InvalidInputError(f"frame of {len(body)} B, limit {FRAME_BYTES_MAX} B")
    return len(body).to_bytes(4, "big") + body


def frame_bytes(header: bytes | bytearray) -> int:
    """Length of the body that a 4-byte header announces. Raises `InvalidInputError` over the limit."""
    size = int.from_bytes(header, "big")
    if not 0 < size <= FRAME_BYTES_MAX:
        raise InvalidInputError(f"frame of {size} B, limit 1 to {FRAME_BYTES_MAX} B")
    return size


def decode_request(body: bytes) -> AnyRequest:
    """Parse a request. Raises `InvalidInputError` that names what is wrong with it."""
    try:
        request = _requests.decode(body)
    except UNDECODABLE as e:
        raise InvalidInputError(f"malformed request: {e}") from e
    _check(request)
    return request


def refused_id(body: bytes) -> int:
    """Return the id of a request that is over a limit; 0 of what is no request at all."""
    try:
        return _requests.decode(body).id
    except UNDECODABLE:
        return 0


def decode_reply(body: bytes) -> AnyReply:
    """Parse a reply. Raises `InvalidInputError` that names what is wrong with it."""
    try:
        return _replies.decode(body)
    except UNDECODABLE as e:
        raise InvalidInputError(f"malformed reply: {e}") from e


def _check(request: AnyRequest) -> None:
    digests = getattr(request, "digests", b"")
    if len(digests) % KEY_BYTES or len(digests) > KEYS_MAX * KEY_BYTES:
        raise InvalidInputError(f"digests of {len(digests)} B: a multiple of {KEY_BYTES} B, {KEYS_MAX} keys at most")
    for name, limit in limits_of(type(request)):
        value = getattr(request, name)
        length = len(value.name if isinstance(value, Handover) else value or ())
        if length > limit:
            raise InvalidInputError(f"{name} of length {length}, limit {limit}")
