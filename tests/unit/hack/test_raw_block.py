"""Which crates LMCache's Rust module may be built from."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import raw_block

CRATES = Path(__file__).resolve().parents[3] / "requirements" / "peers-raw-block.crates"

names = st.text("abcdefghijklmnopqrstuvwxyz-_0123456789", min_size=1, max_size=12)
versions = st.from_regex(r"[0-9]{1,2}\.[0-9]{1,2}\.[0-9]{1,3}", fullmatch=True)
digests = st.text("0123456789abcdef", min_size=64, max_size=64)
crates = st.frozensets(st.tuples(names, versions, digests), max_size=6)


def _lock(found: raw_block.Crates) -> str:
    """As cargo writes it; the package itself has neither source nor checksum."""
    own = '[[package]]\nname = "own"\nversion = "0.0.1"\ndependencies = [\n "libc",\n]\n'
    others = (
        f'[[package]]\nname = "{name}"\nversion = "{version}"\nsource = "registry"\nchecksum = "{digest}"\n'
        for name, version, digest in sorted(found)
    )
    return "version = 4\n\n" + "\n".join((own, *others))


def _pins(wanted: raw_block.Crates) -> str:
    return "# Why.\n" + "".join(f"{name}=={version} --hash=sha256:{digest}\n" for name, version, digest in wanted)


@given(crates)
def test_what_is_pinned_and_locked_is_read_whole(wanted: raw_block.Crates) -> None:
    assert raw_block.pinned(_pins(wanted)) == raw_block.locked(_lock(wanted)) == wanted


@given(crates, crates)
def test_only_the_pinned_crates_pass(wanted: raw_block.Crates, found: raw_block.Crates) -> None:
    if wanted == found:
        raw_block.check(wanted, found)
    else:
        with pytest.raises(raw_block.CrateError):
            raw_block.check(wanted, found)


def test_each_line_of_the_pins_is_one_crate() -> None:
    lines = [line for line in CRATES.read_text().splitlines() if not line.startswith("#")]

    assert len(raw_block.pinned(CRATES.read_text())) == len(lines) > 0
