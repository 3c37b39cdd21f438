"""The demo's page is an extra: what is missing for it is said, and nothing fails."""

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from demo.page import Page

pytestmark = pytest.mark.unit


class Processes:
    """Supervised processes that end at once, saying what they are told to say."""

    def __init__(self, said: str) -> None:
        self.said = said
        self.spawned: list[str] = []

    def spawn(self, name: str, _: Any) -> None:
        self.spawned.append(name)

    def log_tail(self, _: str) -> str:
        return self.said

    def is_running(self, _: str) -> bool:
        return False


def page_over(root: Path, said: str) -> tuple[Page, Processes]:
    processes = Processes(said)
    world = SimpleNamespace(root=root, processes=processes, metrics=lambda: {"metadata": "http://127.0.0.1:1/metrics"})
    return Page(cast("Any", world)), processes


def test_without_prometheus_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: None)
    page, processes = page_over(tmp_path, "")
    page.start()

    assert page.finish() == ["no page: prometheus is not installed (apt-get install prometheus)"]
    assert processes.spawned == []


def test_without_the_chart_library_it_says_what_the_page_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    page, processes = page_over(tmp_path, "kvstrata ui: the chart library is missing: ...\n")
    page.start()

    assert page.finish() == ["no page: kvstrata ui: the chart library is missing: ..."]
    assert processes.spawned == ["prometheus", "ui"]
