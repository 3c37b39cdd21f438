"""The protocol between two agents: msgpack frames over TCP. Pure.

A frame is a 4-byte big-endian length and one msgpack array, tagged with the verb. The bytes of a block follow their
`Chunk` frame unframed. The asking side sends `Hello` first; both sides close the connection on anything malformed.
"""

from typing import Final

import msgspec

from kvstrata_agent.cache.ports import QUESTION_BLOCKS_MAX
from kvstrata_api.blocks import KEY_BYTES, LAYOUT_ID_BYTES
from kvstrata_api.checksum import CHECKSUM_BYTES
from kvstrata_api.decoding import UNDECODABLE
from kvstrata_api.errors import InvalidInputError
from kvstrata_api.trace_context import TRACEPARENT_CHARS
from kvstrata_api.wire import HANDOVER_CHARS_MAX, Seconds

PROTOCOL_VERSION: Final = 1
FRAME_BYTES_MAX: Final = 1 << 20
"""Largest frame, either way: an answer to `KEYS_MAX` keys takes a tenth of it."""
KEYS_MAX: Final = QUESTION_BLOCKS_MAX
CHUNK_BYTES_MAX: Final = 1 << 20
"""Bytes of a block that follow one `Chunk`: other answers get between two of them."""
TOKEN_CHARS_MAX: Final = 16_384
SCOPE_CHARS_MAX: Final = 512
TIERS_MAX: Final = 8
TIER_CHARS_MAX: Final = 63
PLACE_CHARS_MAX: Final = 128
"""Of a file's name, and of a codec's."""
REASON_CHARS_MAX: Final = 64
BLOCK_BYTES_MAX: Final = 1 << 30
"""No layout comes near it."""
LENGTH_BYTES: Final = 4
WEIGHTS_BYTES_MAX: Final = 64 << 20
"""Of weights, or of a listing of them, in one answer."""


class Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Anything that travels in a frame; `id` joins question and answer."""

    id: int


class Hello(Message, frozen=True, array_like=True, tag=True):
    """First frame of a connection: who asks, with the token that proves it."""

    version: int
    agent: str
    token: str


class Welcome(Message, frozen=True, array_like=True, tag=True):
    """Answer to Hello."""

    version: int
    agent: str
    epoch: int


class Describe(Message, frozen=True, array_like=True, tag=True):
    """Ask for what NIXL must know to read the owner's extents."""


class Described(Message, frozen=True, array_like=True, tag=True):
    """Answer to Describe."""

    generation: int
    """Moves on when extents come or go."""
    nixl: bytes
    """Empty where the owner has no NIXL."""


class Lend(Message, frozen=True, array_like=True, tag=True):
    """Lease blocks of one scope and layout."""

    scope: str
    layout_id: bytes
    digests: bytes
    """Joined, `KEYS_MAX` at most."""
    lease_s: Seconds
    epoch: int = 0
    """Of the incarnation that is believed to hold them: another one lends nothing. 0: whoever answers."""
    tiers: tuple[str, ...] = ()
    """Shared tiers that the asking agent can read by itself."""
    traceparent: str = ""
    """Span of the asking agent (`kvstrata_api.trace_context`); the owner's are its children."""


class ReadAddress(msgspec.Struct, frozen=True, array_like=True):
    """Where a leased block lies on a shared tier: a record file below the owner's directory."""

    tier: str
    file: str
    offset: int
    slot_bytes: int
    codec: str
    stored_bytes: int


class Loan(msgspec.Struct, frozen=True, array_like=True):
    """One block that may be read until its lease ends; lease 0 means that it cannot be had."""

    lease: int = 0
    address: int = 0
    """In the owner's process, inside an extent known to NIXL."""
    size_bytes: int = 0
    stamp: int = 0
    epoch: int = 0
    parent: bytes = b""
    checksum: bytes = b""
    """Of the block's bytes; of the stored ones where `place` is given."""
    place: ReadAddress | None = None
    """The asking agent is to read it there; nothing is sent for it."""


class Lending(Message, frozen=True, array_like=True, tag=True):
    """Answer to Lend, in the order of the digests."""

    generation: int
    """Of `Described`: an older description does not know all addresses."""
    loans: tuple[Loan, ...]


class Pull(Message, frozen=True, array_like=True, tag=True):
    """Send the bytes of leased blocks over this connection."""

    leases: tuple[int, ...]
    traceparent: str = ""
    """As in `Lend`."""


class Chunk(Message, frozen=True, array_like=True, tag=True):
    """Part of the answer to Pull: `size_bytes` bytes of a block follow this frame."""

    lease: int
    offset: int
    size_bytes: int


class Follow(Message, frozen=True, array_like=True, tag=True):
    """Ask for parts of blocks that are still written.

    Chunks come first: `lease` in them counts parts behind the first `have`, `offset` goes over that part of all blocks,
    one after the other.
    """

    scope: str
    layout_id: bytes
    digests: bytes
    epoch: int
    name: str
    part_bytes: int
    have: int
    most: int
    """Parts of each block that the answer may bring."""
    wait_s: Seconds


class Followed(Message, frozen=True, array_like=True, tag=True):
    """Answer to Follow: for each of the leading blocks that are handed over under that name."""

    parts: int
    """Leading parts that every one has now; -1 when there is none, or one was lost on the way."""
    sums: tuple[bytes, ...]
    """Joined checksums of the parts that came."""
    parents: tuple[bytes, ...]
    stamps: tuple[int, ...]
    checksums: tuple[bytes, ...]
    """Of those that are whole, empty for others."""


class Trace(Message, frozen=True, array_like=True, tag=True):
    """Ask which blocks stand before one in its chain; no lease is given, no byte of a block is sent."""

    scope: str
    digest: bytes
    most: int
    """Blocks that the answer may name."""
    epoch: int
    """Of the incarnation that is believed to hold it, as in Lend."""


class Traced(Message, frozen=True, array_like=True, tag=True):
    """Answer to Trace."""

    layout_id: bytes
    raw_bytes: int
    digests: bytes
    """Joined, from the block that was asked for towards the root; empty when it is not here."""
    before: bytes
    """What the last of them continues; empty at the root."""


class Offer(Message, frozen=True, array_like=True, tag=True):
    """Ask an agent of another pool to take blocks over: it fetches them by itself, as any blocks of other agents."""

    scope: str
    tenant: str
    layout_id: bytes
    raw_bytes: int
    digests: bytes
    """Joined, consecutive blocks of one chain, the first one first."""
    before: bytes
    """What the first of them continues; empty at the root."""
    tier: str
    """Empty for the fastest one that survives a restart."""


class Taken(Message, frozen=True, array_like=True, tag=True):
    """Answer to Offer."""

    count: int
    """Leading blocks that are whole in that tier now."""
    reason: str
    """Why not all; CamelCase, empty when all are."""


class Weights(Message, frozen=True, array_like=True, tag=True):
    """Ask what an agent has of one revision of a model."""

    model: str
    revision: str


class WeightsHeld(Message, frozen=True, array_like=True, tag=True):
    """Answer to Weights; all empty where it has nothing."""

    digest: str
    """Of its listing of all files."""
    listing_bytes: int
    staged_bytes: int


class ReadWeights(Message, frozen=True, array_like=True, tag=True):
    """Ask for bytes of a model's files; they come in chunks of lease 0, and are not verified by the owner."""

    model: str
    revision: str
    digest: str
    """Of the listing that the question speaks of: files of another one are refused."""
    file: int
    """Number of the file in that listing; -1 for the listing itself."""
    offset: int
    size_bytes: int


class End(Message, frozen=True, array_like=True, tag=True):
    """End leases; there is no answer."""

    leases: tuple[int, ...]


class Done(Message, frozen=True, array_like=True, tag=True):
    """Last part of the answer to Pull."""


class Refused(Message, frozen=True, array_like=True, tag=True):
    """The question was not granted."""

    reason: str


Question = Hello | Describe | Lend | Pull | Follow | Trace | Offer | Weights | ReadWeights | End
Answer = Welcome | Described | Lending | Chunk | Followed | Traced | Taken | WeightsHeld | Done | Refused

_encoder: Final = msgspec.msgpack.Encoder()
_questions: Final = msgspec.msgpack.Decoder(Question)
_answers: Final = msgspec.msgpack.Decoder(Answer)


def encode(message: Question | Answer) -> bytes:
    """Write a message with its length."""
    body = _encoder.encode(message)
    assert len(body) <= FRAME_BYTES_MAX, f"frame of {len(body)} B, limit {FRAME_BYTES_MAX} B"
    return len(body).to_bytes(LENGTH_BYTES, "big") + body


def decode_length(prefix: bytes) -> int:
    """Bytes of the frame that follows. Raises `InvalidInputError` when it is too long."""
    size_bytes = int.from_bytes(prefix, "big")
    if not 0 < size_bytes <= FRAME_BYTES_MAX:
        raise InvalidInputError(f"frame of {size_bytes} B, limit {FRAME_BYTES_MAX} B")
    return size_bytes


def decode_question(body: bytes) -> Question:
    """Read a question. Raises `InvalidInputError` with what is wrong with it."""
    try:
        question: Question = _questions.decode(body)
    except UNDECODABLE as e:
        raise InvalidInputError(f"malformed question: {e}") from e
    if isinstance(question, Lend | Follow | Offer):
        _check_keys(question)
    if isinstance(question, Lend):
        _check_tiers(question)
    if isinstance(question, Lend | Pull) and len(question.traceparent) > TRACEPARENT_CHARS:
        raise InvalidInputError(f"traceparent of {len(question.traceparent)} characters, limit {TRACEPARENT_CHARS}")
    if isinstance(question, Follow):
        _check_progress(question)
    _check_places(question)
    if isinstance(question, Hello) and len(question.token) > TOKEN_CHARS_MAX:
        raise InvalidInputError(f"token of {len(question.token)} characters, limit {TOKEN_CHARS_MAX}")
    if isinstance(question, Pull) and len(question.leases) > KEYS_MAX:
        raise InvalidInputError(f"pull of {len(question.leases)} blocks, limit {KEYS_MAX}")
    return question


def _check_places(question: Question) -> None:
    match question:
        case Trace():
            _check_trace(question)
        case Offer():
            _check_offer(question)
        case Weights() | ReadWeights():
            _check_weights(question)
        case _:
            pass


def _check_keys(asked: Lend | Follow | Offer) -> None:
    if len(asked.digests) % KEY_BYTES or not 0 < len(asked.digests) <= KEYS_MAX * KEY_BYTES:
        raise InvalidInputError(f"digests of {len(asked.digests)} B: 1 to {KEYS_MAX} keys of {KEY_BYTES} B")
    if len(asked.layout_id) != LAYOUT_ID_BYTES or len(asked.scope) > SCOPE_CHARS_MAX:
        raise InvalidInputError(f"layout id of {len(asked.layout_id)} B, scope of {len(asked.scope)} characters")


def _check_tiers(lend: Lend) -> None:
    if len(lend.tiers) > TIERS_MAX or any(len(name) > TIER_CHARS_MAX for name in lend.tiers):
        raise InvalidInputError(f"{len(lend.tiers)} tiers, limit {TIERS_MAX} of {TIER_CHARS_MAX} characters")


def _check_progress(follow: Follow) -> None:
    sizes = f"part_bytes {follow.part_bytes}, have {follow.have}, most {follow.most}"
    if follow.part_bytes <= 0 or follow.have < 0 or follow.most < 0 or len(follow.name) > HANDOVER_CHARS_MAX:
        found = f"{sizes}, name of {len(follow.name)} characters"
        raise InvalidInputError(f"{found}: part_bytes 1 or more, the others 0 or more, {HANDOVER_CHARS_MAX} characters")


def _check_trace(trace: Trace) -> None:
    if len(trace.digest) != KEY_BYTES or len(trace.scope) > SCOPE_CHARS_MAX or not 0 < trace.most <= KEYS_MAX:
        found = f"digest of {len(trace.digest)} B, scope of {len(trace.scope)} characters, most {trace.most}"
        raise InvalidInputError(f"{found}: {KEY_BYTES} B, {SCOPE_CHARS_MAX} characters and 1 to {KEYS_MAX} wanted")


def _check_offer(offer: Offer) -> None:
    if len(offer.before) not in (0, KEY_BYTES) or not 0 < offer.raw_bytes <= BLOCK_BYTES_MAX:
        raise InvalidInputError(
            f"offer behind {len(offer.before)} B, of blocks of {offer.raw_bytes} B: 0 or {KEY_BYTES} B wanted, and "
            f"1 to {BLOCK_BYTES_MAX} B"
        )
    if max(len(offer.tenant), len(offer.tier)) > TIER_CHARS_MAX or not offer.tenant:
        found = f"tenant of {len(offer.tenant)} characters, tier of {len(offer.tier)}"
        raise InvalidInputError(f"{found}: 1 to {TIER_CHARS_MAX} wanted, and {TIER_CHARS_MAX} at most")


def _check_weights(asked: Weights | ReadWeights) -> None:
    if max(len(asked.model), len(asked.revision)) > TIER_CHARS_MAX:
        found = f"model of {len(asked.model)} characters, revision of {len(asked.revision)}"
        raise InvalidInputError(f"{found}: {TIER_CHARS_MAX} at most")
    if isinstance(asked, ReadWeights) and not (
        0 < asked.size_bytes <= WEIGHTS_BYTES_MAX and asked.offset >= 0 and asked.file >= -1
    ):
        raise InvalidInputError(
            f"{asked.size_bytes} B from {asked.offset} of file {asked.file}: 1 to {WEIGHTS_BYTES_MAX} B, from 0 or "
            "more, of file -1 or more wanted"
        )


def decode_answer(body: bytes) -> Answer:
    """Read an answer. Raises `InvalidInputError` with what is wrong with it."""
    try:
        answer: Answer = _answers.decode(body)
    except UNDECODABLE as e:
        raise InvalidInputError(f"malformed answer: {e}") from e
    if isinstance(answer, Chunk) and not 0 < answer.size_bytes <= CHUNK_BYTES_MAX:
        raise InvalidInputError(f"chunk of {answer.size_bytes} B, limit {CHUNK_BYTES_MAX} B")
    if isinstance(answer, WeightsHeld) and not 0 <= answer.listing_bytes <= WEIGHTS_BYTES_MAX:
        raise InvalidInputError(f"listing of {answer.listing_bytes} B, limit {WEIGHTS_BYTES_MAX} B")
    if isinstance(answer, Followed) and not _is_even(answer):
        raise InvalidInputError("followed blocks with fields of different lengths")
    if isinstance(answer, Traced) and not _is_chain(answer):
        raise InvalidInputError("a traced chain with fields of wrong lengths")
    if isinstance(answer, Taken) and (not 0 <= answer.count <= KEYS_MAX or len(answer.reason) > REASON_CHARS_MAX):
        raise InvalidInputError(f"{answer.count} blocks taken, limit {KEYS_MAX}, or a reason that is too long")
    if isinstance(answer, Lending) and not all(_is_sound(loan) for loan in answer.loans):
        raise InvalidInputError("a loan with a checksum, parent or place of a wrong length")
    return answer


def _is_even(followed: Followed) -> bool:
    fields = (followed.parents, followed.stamps, followed.checksums)
    return followed.parts < 0 or all(len(f) == len(followed.sums) for f in fields)


def _is_chain(traced: Traced) -> bool:
    if len(traced.digests) % KEY_BYTES or len(traced.digests) > KEYS_MAX * KEY_BYTES:
        return False
    is_placed = len(traced.layout_id) == LAYOUT_ID_BYTES and traced.raw_bytes > 0
    return not traced.digests or (is_placed and len(traced.before) in (0, KEY_BYTES))


def _is_sound(loan: Loan) -> bool:
    if loan.place is not None and max(len(loan.place.file), len(loan.place.codec)) > PLACE_CHARS_MAX:
        return False
    return loan.lease == 0 or (len(loan.checksum) == CHECKSUM_BYTES and len(loan.parent) in (0, KEY_BYTES))
