"""docs/api.md: its program runs against a real agent, and it speaks of every public name and of no other."""

import inspect
import re
from pathlib import Path
from typing import Any

import pytest

import kvstrata
from support.agent.standalone import Up, declared

pytestmark = [pytest.mark.system, pytest.mark.timeout(120)]

DOCUMENT = Path(__file__).parents[2] / "docs" / "api.md"
TEXT = DOCUMENT.read_text()
CLASSES: tuple[type, ...] = (kvstrata.PrefixCache, kvstrata.Client)


def public(of: type) -> set[str]:
    return {name for name, _ in inspect.getmembers(of) if not name.startswith("_")}


def test_the_program_of_the_document_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = "\n".join(re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL))
    with Up(tmp_path, ("--pool", "local")) as up:
        tier = {"name": "dram", "type": "HostDRAM", "capacityPerNode": "32Mi", "hostDRAM": {"pageSize": "4Ki"}}
        compatibility = {"model": "*", "revision": "*", "dtype": "bf16"}
        up.declare(declared("KVPool", "local", {"compatibility": compatibility, "tiers": [tier]}))
        up.start()
        monkeypatch.setenv("KVSTRATA_SOCKET", str(up.socket))
        names: dict[str, Any] = {}
        try:
            exec(compile(program, str(DOCUMENT), "exec"), names)  # noqa: S102  The document's own program.
        finally:
            names["client"].close()


def test_the_document_has_every_public_name() -> None:
    assert [n for n in kvstrata.__all__ if not re.search(rf"`{n}\b", TEXT)] == []
    for of in CLASSES:
        assert [n for n in sorted(public(of)) if not re.search(rf"[`.]{n}\b", TEXT)] == [], of


def test_calls_of_the_document_have_the_parameters_of_the_code() -> None:
    listed = re.findall(r"^\| `(\w+)\((.*?)\)`", TEXT, re.MULTILINE)
    assert len(listed) > 12
    for name, written in listed:
        found = [getattr(c, name) for c in CLASSES if hasattr(c, name)]
        wanted = re.findall(r"(?:^|, )(\w+)", written)
        assert any(list(inspect.signature(f).parameters)[1:] == wanted for f in found), (name, wanted)


def test_the_asyncio_classes_have_the_calls_of_the_blocking_ones() -> None:
    of_devices = {"devices", "load_rows"}  # Engines read the memory of devices on threads of their own.
    assert public(kvstrata.PrefixCache) - of_devices == public(kvstrata.AsyncPrefixCache)
    assert public(kvstrata.Client) - {"wait_settled"} == public(kvstrata.AsyncClient) - {"start"}
