"""What the demo shows: steps as they happen, a live table of prompts and tiers, and the last line."""

import json
import sys
import time
from collections.abc import Sequence
from typing import Any, Final

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table

from demo.rows import Answer, Row, arrived_ms, totals, without_reuse_s
from kvstrata_api.units import format_rounded

_REFRESH_PER_S: Final = 4.0
WIDTH: Final = 140
"""Columns where there is no terminal to ask."""


class Report:
    """Writes to the terminal; on anything else than a terminal the tables come once, at the end."""

    def __init__(self) -> None:
        """Start the clock that steps are shown with."""
        self.console = Console(highlight=False, width=None if sys.stdout.isatty() else WIDTH)
        self._begin_s = time.monotonic()
        self._live: Live | None = None
        self._is_closed = False
        self._rows: list[Row] = []
        self._tiers: list[dict[str, Any]] = []
        self._answers: list[Answer] = []
        self._first_hit_s: float | None = None

    @property
    def wall_s(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._begin_s

    def step(self, text: str) -> None:
        """Tell of one step."""
        self.console.print(f"[dim]{self.wall_s:5.1f} s[/dim]  {text}")

    def lines(self, lines: Sequence[str]) -> None:
        """Show lines as they are."""
        for line in lines:
            self.console.print(line, soft_wrap=True, markup=False)

    def open_table(self) -> None:
        """Begin to show the live table."""
        if self.console.is_terminal:
            self._live = Live(self._tables(), console=self.console, refresh_per_second=_REFRESH_PER_S)
            self._live.start()

    def served(self, row: Row, agents: Sequence[dict[str, Any]]) -> None:
        """Show one served prompt, and the tiers as the agents' `stats` tell them now."""
        self._rows.append(row)
        self._tiers = list(agents)
        if self._first_hit_s is None and row.result.hit_blocks:
            self._first_hit_s = round(self.wall_s, 1)
        if self._live is not None:
            self._live.update(self._tables())
        else:
            result = row.result
            self.step(
                f"{row.act}: {row.tenant} on {row.node}, turn {result.turn.number}, {_sources(row)} restored, "
                f"first token after {_ms(result.first_token_s)} ms{_overlap(row)}"
            )

    def answered(self, answer: Answer) -> None:
        """Tell of one answer of another engine's server, equal to the one without kvstrata."""
        self._answers.append(answer)
        found = ", ".join(f"{tier} {tokens}" for tier, tokens in sorted(answer.hits.items())) or "none"
        self.step(
            f"{answer.act}: {answer.tenant}, turn {answer.turn}, {answer.tokens} tokens, {found} loaded, "
            f"answered after {_ms(answer.took_s)} ms, equal"
        )

    def close_table(self) -> None:
        """Leave the final state of the tables on the screen. Idempotent."""
        if self._live is not None:
            self._live.stop()
        elif self._rows and not self._is_closed:
            self.console.print(self._tables())
        self._live = None
        self._is_closed = True

    def last_line(self, problem: str = "") -> None:
        """Print the line of JSON that tools read."""
        rows = self._rows
        told = {
            "logits_equal": bool(rows) and not problem and all(r.result.is_equal for r in rows),
            "hit_blocks": sum(r.result.hit_blocks for r in rows),
            "restored_from": totals(rows),
            "layers_ms": arrived_ms(rows),
            "wrong_blocks": sum(r.result.wrong_blocks for r in rows),
            "first_hit_s": self._first_hit_s,
            "wall_s": round(self.wall_s, 1),
        }
        if self._answers:
            loaded = sum(sum(answer.hits.values()) for answer in self._answers)
            told["vllm"] = {"answers_equal": len(self._answers), "hit_tokens": loaded}
        print(json.dumps({"demo": told | ({"problem": problem} if problem else {})}), flush=True)

    def _tables(self) -> Group:
        return Group(_prompts(self._rows), _fills(self._tiers))


def _prompts(rows: Sequence[Row]) -> Table:
    table = Table(title="Prompts of a recorded agent session, served through kvstrata", title_justify="left")
    for heading in ("what happened before", "tenant", "node", "turn", "tokens", "restored from", "moved"):
        table.add_column(heading)
    for heading in ("first token", "without reuse", "logits"):
        table.add_column(heading, justify="right")
    for row in rows:
        result = row.result
        without_s = without_reuse_s(rows, row)
        without = f"{_ms(without_s)} ms" if without_s is not None else ""
        facts = (row.act, row.tenant, row.node, str(result.turn.number), str(len(result.turn.tokens)))
        equal = "equal" if result.is_equal else "DIFFERENT"
        times = (f"{_ms(result.first_token_s)} ms", without, equal)
        table.add_row(*facts, _sources(row), format_rounded(result.moved_bytes), *times)
    return table


def _fills(agents: Sequence[dict[str, Any]]) -> Table:
    table = Table(title="Tiers", title_justify="left")
    for heading in ("agent", "tier", "medium", "used", "capacity"):
        table.add_column(heading)
    for agent in agents:
        for tier in agent["tiers"]:
            used, capacity = format_rounded(tier["used_bytes"]), format_rounded(tier["capacity_bytes"])
            medium = tier["medium"] + (" (emulated)" if tier["emulated"] else "")
            table.add_row(agent["agent"], tier["name"], medium, f"{used} ({tier['used_percent']} %)", capacity)
    return table


def _sources(row: Row) -> str:
    found = ", ".join(f"{source} {count}" for source, count in sorted(row.result.sources.items()))
    return found or "nothing"


def _overlap(row: Row) -> str:
    """How much of the restoring was hidden behind the computing."""
    overlap = row.result.overlap
    if not overlap.all_layers_s:
        return ""
    return (
        f"; layers arrived after {overlap.first_layer_s * 1e3:.1f} to {overlap.all_layers_s * 1e3:.1f} ms, "
        f"the model waited {overlap.waited_s * 1e3:.1f} ms for them"
    )


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.0f}"
