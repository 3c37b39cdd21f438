"""The attacks of docs/security.md on kvstrata, as processes: none harms it, and each could be carried out."""

from pathlib import Path

import pytest
import redteam.__main__ as redteam
from redteam.attacks import ATTACKS, HARM, Result, Seen
from redteam.systems import SYSTEMS, Kvstrata

pytestmark = [pytest.mark.system, pytest.mark.timeout(300)]

QUICK = [name for name, attack in ATTACKS.items() if not attack.is_alone]


@pytest.mark.parametrize(("system", "names"), [("kvstrata", ["swap", "flip"]), ("kvstrata-sealed", QUICK)])
def test_nothing_is_served_that_is_another_tenants_or_damaged(system: str, names: list[str]) -> None:
    seen = dict(_attacked(system, names))

    assert set(seen) == set(names)
    assert {name: r for name, r in seen.items() if r.seen in HARM or r.seen == Seen.FAILED} == {}


@pytest.mark.parametrize("attack", [name for name in ATTACKS if name not in QUICK])
def test_it_serves_on(attack: str) -> None:
    ((_, result),) = _attacked("kvstrata", [attack])

    assert result.seen in {Seen.HELD, Seen.MISS}, result.evidence


def test_an_agent_that_verifies_nothing_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The judgement itself: a block that comes with another tenant's bytes is `served`, one with others is `wrong`."""
    monkeypatch.setattr(Kvstrata, "command", lambda self, _: _COMMAND(self, "a"))

    seen = dict(_attacked("kvstrata", ["read", "timing"]))

    assert (seen["read"].seen, seen["timing"].seen) == (Seen.SERVED, Seen.TOLD)


_COMMAND = Kvstrata.command


def _attacked(system: str, names: list[str]) -> list[tuple[str, Result]]:
    return [(name, result) for name, result, _ in redteam.attack(SYSTEMS[system], names, 1)]


def test_a_small_disk_is_taken_away_again(tmp_path: Path) -> None:
    at = tmp_path / "disk"
    with redteam.small_disk(at):
        assert at.is_mount()

    assert not at.is_mount()
