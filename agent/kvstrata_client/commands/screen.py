"""The screen of `kvstrata top`: tables that are filled again and again. textual ends here."""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Final

from rich.text import Text
from textual import work
from textual.app import App, ComposeResult
from textual.binding import BindingType
from textual.containers import VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import DataTable, Footer, Input, Static, TabbedContent, TabPane

from kvstrata_api.errors import KvStrataError
from kvstrata_client.commands.top import Tab, View, clock, order

_NAMES: Final = ("Nodes", "Tiers", "Tenants", "Sessions", "Operations", "Models", "Findings")
_STYLES: Final = {"BROKEN": "bold red", "WARNING": "yellow"}


class Row(ModalScreen[None]):
    """One row in full: cells of a table are cut at the edge."""

    BINDINGS: ClassVar[list[BindingType]] = [("escape,enter,q", "dismiss", "back")]
    DEFAULT_CSS = """
    Row { align: center middle; }
    Row > VerticalScroll { width: 90%; max-height: 80%; height: auto; border: round $primary; padding: 1 2; }
    """

    def __init__(self, head: Sequence[str], cells: Sequence[str]) -> None:
        super().__init__()
        width = max(map(len, head))
        self._text = "\n".join(f"{name.lower():{width}}  {cell}" for name, cell in zip(head, cells, strict=True))

    def compose(self) -> ComposeResult:
        """Draw it."""
        with VerticalScroll():
            yield Static(self._text, markup=False)


class Top(App[None]):
    """Looks every few seconds, in a thread, and draws what it saw. What it saw last stays when a look fails."""

    TITLE = "kvstrata top"
    CSS = """
    Screen { overflow: hidden; }
    TabbedContent { height: 1fr; }
    #summary { padding: 0 1; background: $panel; }
    #summary.broken { background: $error-darken-2; }
    .note { padding: 1 2; color: $text-muted; }
    Input { display: none; }
    Input.shown { display: block; }
    TabPane { padding: 0; height: 1fr; }
    DataTable { height: 1fr; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        *((str(i), f"choose('{name}')", name) for i, name in enumerate(_NAMES, 1)),
        ("s", "sort", "sort"),
        ("slash", "filter", "filter"),
        ("r", "look", "look now"),
        ("q", "quit", "end"),
    ]
    ENABLE_COMMAND_PALETTE = False
    AUTO_FOCUS = f"#table-{_NAMES[0]}"

    def __init__(self, look: Callable[[], View], interval_s: float) -> None:
        super().__init__()
        self._look = look
        self._interval_s = interval_s
        self._view: View | None = None
        self._sort = dict.fromkeys(_NAMES, -1)
        """Column that each table is sorted by; -1: as it came."""
        self._words = ""
        self.has_looked = False
        """Whether there is anything to see yet, be it what kept it from looking."""

    def compose(self) -> ComposeResult:
        """Draw the frame."""
        yield Static("looking...", id="summary", markup=False)
        with TabbedContent(initial=_NAMES[0]):
            for name in _NAMES:
                with TabPane(name, id=name):
                    yield DataTable(id=f"table-{name}", cursor_type="row", zebra_stripes=True)
                    yield Static("", id=f"note-{name}", classes="note", markup=False)
        yield Input(placeholder="words that a row must have; enter ends", id="words", disabled=True)
        yield Footer()

    def on_mount(self) -> None:
        """Begin to look."""
        self.set_interval(self._interval_s, self.action_look)
        self.action_look()

    @work(thread=True, exclusive=True)
    def action_look(self) -> None:
        """Look now."""
        try:
            seen = self._look()
        except KvStrataError as e:
            self.call_from_thread(self._fail, str(e))
        else:
            self.call_from_thread(self._show, seen)

    def action_choose(self, name: str) -> None:
        """Bring a table to the front."""
        self.query_one(TabbedContent).active = name
        self.query_one(f"#table-{name}", DataTable).focus()

    def action_sort(self) -> None:
        """Sort the table in front by its next column; after the last, as it came."""
        tab = self._tab()
        if tab is not None:
            following = self._sort[tab.name] + 1
            self._sort[tab.name] = following if following < len(tab.head) else -1
            self._fill(tab)

    def action_filter(self) -> None:
        """Ask for words."""
        field = self.query_one("#words", Input)
        field.add_class("shown")
        field.disabled = False
        field.focus()

    def on_input_changed(self, event: Input.Changed) -> None:
        """Show only rows that have the words."""
        self._words = event.value
        for tab in self._view.tabs if self._view is not None else ():
            self._fill(tab)

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Go back to the table."""
        event.input.set_class(bool(event.value), "shown")
        event.input.disabled = True
        self.action_choose(self.query_one(TabbedContent).active)

    def on_data_table_row_selected(self, event: DataTable.RowSelected) -> None:
        """Show a row in full."""
        tab = self._tab()
        if tab is not None:
            self.push_screen(Row(tab.head, [str(cell) for cell in event.data_table.get_row(event.row_key)]))

    def _tab(self) -> Tab | None:
        active = self.query_one(TabbedContent).active
        return next((tab for tab in self._view.tabs if tab.name == active), None) if self._view is not None else None

    def _fail(self, why: str) -> None:
        self.has_looked = True
        summary = self.query_one("#summary", Static)
        summary.update(f"{clock()} {why}" + ("; below is what was seen last" if self._view is not None else ""))
        summary.add_class("broken")

    def _show(self, seen: View) -> None:
        self._view, self.has_looked = seen, True
        summary = self.query_one("#summary", Static)
        summary.update(f"{clock()} {seen.summary}")
        summary.set_class(not seen.is_well, "broken")
        for tab in seen.tabs:
            self._fill(tab)

    def _fill(self, tab: Tab) -> None:
        """Put rows into a table; its cursor stays in its line."""
        table: DataTable[Any] = self.query_one(f"#table-{tab.name}", DataTable)
        line = table.cursor_row
        by = self._sort[tab.name]
        table.clear(columns=True)
        table.add_columns(*(f"{name} ▾" if i == by else name for i, name in enumerate(tab.head)))
        words = self._words.lower().split()
        rows = [row for row in tab.rows if all(any(word in cell.lower() for cell in row) for word in words)]
        rows = rows if by < 0 else sorted(rows, key=lambda row: order(row[by]))
        for row in rows:
            table.add_row(*(Text(cell, style=_STYLES.get(cell, "")) for cell in row))
        table.move_cursor(row=min(line, max(0, len(rows) - 1)))
        table.display = bool(tab.rows)
        note = self.query_one(f"#note-{tab.name}", Static)
        note.update("" if tab.rows else tab.note)
        note.display = not tab.rows
