"""What is known about each served prompt. Pure."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from demo.transcripts import Turn

if TYPE_CHECKING:
    from kvstrata_client.connectors.transformers import Overlap

AFTER_KILL: Final = "after kill -9"


@dataclass(frozen=True, slots=True)
class TurnResult:
    """One turn of one engine, checked."""

    turn: Turn
    sources: Counter[str]
    """Restored blocks by where they were: a tier's name, or `remote`."""
    shared_blocks: int
    """How many of them lay in a scope that the tenant shares."""
    first_token_s: float
    """From the prompt's arrival to the logits of its last token; restoring included."""
    overlap: "Overlap"
    """How the restored layers arrived while the model computed."""
    saved_blocks: int
    """Blocks that became available by this turn."""
    refusal: str
    """Why some did not; empty when all did."""
    moved_bytes: int
    """Bytes copied out of and into the agent's memory."""
    wrong_blocks: int
    """Restored blocks whose bytes are not those of the uninterrupted run, or that failed their checksum."""
    is_equal: bool
    """Whether the logits are those of the uninterrupted run, bit for bit."""

    @property
    def hit_blocks(self) -> int:
        """Blocks restored."""
        return self.sources.total()


@dataclass(frozen=True, slots=True)
class Row:
    """One served prompt, for the table and the checks."""

    act: str
    tenant: str
    node: str
    result: TurnResult


@dataclass(frozen=True, slots=True)
class Answer:
    """One prompt that a server of another engine answered as it does without kvstrata."""

    act: str
    tenant: str
    turn: int
    tokens: int
    hits: Mapping[str, int]
    """Tokens of the prompt that were loaded, by tier; `remote` for another node's."""
    took_s: float
    """From the request to the whole answer."""


def totals(rows: Sequence[Row]) -> dict[str, int]:
    """Restored blocks by what had happened to them, for the last line."""
    by_act: Counter[str] = Counter()
    for row in rows:
        by_act[row.act] += row.result.hit_blocks
    sources = sum((row.result.sources for row in rows if row.act != AFTER_KILL), Counter())
    return {
        "dram": sources["dram"],
        "nvme": sources["nvme"],
        "remote": sources["remote"],
        "after_kill": by_act[AFTER_KILL],
    }


def arrived_ms(rows: Sequence[Row]) -> dict[str, float]:
    """Milliseconds that restored layers took to arrive, and those of them that the model waited for."""
    with_some = [row.result.overlap for row in rows if row.result.hit_blocks]
    arriving_s, waited_s = sum(o.all_layers_s for o in with_some), sum(o.waited_s for o in with_some)
    return {"arriving": round(arriving_s * 1e3, 1), "waited": round(waited_s * 1e3, 1)}


def without_reuse_s(rows: Sequence[Row], row: Row) -> float | None:
    """Seconds to the first token of the row's prompt where this run has served it with nothing cached, else None."""
    same = (r for r in rows if r.result.turn == row.result.turn and not r.result.hit_blocks)
    return next((r.result.first_token_s for r in same), None)
