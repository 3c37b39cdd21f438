"""The offload interface: one shape in C and Python, kernels that go through it, and libraries that get it wrong."""

import _ctypes
import ctypes
import re
import shlex
import subprocess
import sysconfig
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import kvstrata_native
from kvstrata_native import offload
from kvstrata_native.choice import PYTHON
from kvstrata_native.forms import Kind, Mixing, Packing, narrowed_bytes_max
from kvstrata_native.offload import FROM_BYTES, KERNELS, REFERENCE, OffloadError, Segment, Status, Step, descriptor

pytestmark = [
    pytest.mark.unit,
    pytest.mark.skipif(kvstrata_native.level == PYTHON, reason="the interface is of compiled kernels"),
]

ROOT = Path(__file__).resolve().parents[3]
HEADER = ROOT / "agent" / "kvstrata_native" / "offload.h"
STUB = ROOT / "tests" / "support" / "native" / "stub_offload.c"
CC = shlex.split(sysconfig.get_config_var("CC") or "cc")[0]
NOISE = np.random.default_rng(3).integers(0, 256, 2 * FROM_BYTES + 77, np.uint8)


@pytest.fixture(autouse=True)
def kernels_afterwards() -> Iterator[None]:
    yield
    offload.engage(KERNELS)


def stub(folder: Path, macro: str) -> str:
    made = folder / f"{macro.lower()}.so"
    command = (CC, "-std=c11", "-shared", "-fPIC", f"-D{macro}", f"-I{HEADER.parent}", str(STUB), "-o", str(made))
    subprocess.run(command, check=True)
    return str(made)


def test_structs_have_the_sizes_and_offsets_of_the_header(tmp_path: Path) -> None:
    structs = {
        "KvoSegment": offload.Segment, "KvoParameters": offload.Parameters, "KvoDescriptor": offload.Descriptor,
        "KvoCompletion": offload.Completion, "KvoDescription": offload.Description,
        "KvoCounters": offload.DeviceCounters, "KvoApi": offload.Api,
    }  # fmt: skip
    lines = [
        f'printf("{name}.{field[0]} %zu\\n", offsetof({name}, {field[0]}));'
        for name, struct in structs.items()
        for field in struct._fields_
    ] + [f'printf("{name} %zu\\n", sizeof({name}));' for name in structs]
    source = tmp_path / "sizes.c"
    includes = '#include <stddef.h>\n#include <stdio.h>\n#include "offload.h"\n'
    source.write_text(includes + "int main(void) {" + "\n".join(lines) + "return 0; }\n")
    subprocess.run((CC, f"-I{HEADER.parent}", str(source), "-o", str(tmp_path / "sizes")), check=True)
    told = dict(line.split() for line in subprocess.check_output(tmp_path / "sizes", text=True).splitlines())

    ours = {name: ctypes.sizeof(struct) for name, struct in structs.items()}
    ours |= {f"{n}.{f[0]}": getattr(s, f[0]).offset for n, s in structs.items() for f in s._fields_}
    assert {name: int(size) for name, size in told.items()} == ours


@pytest.mark.parametrize(
    ("prefix", "enum"),
    [
        ("KVO_E_", offload.Status),
        ("KVO_STEP_", offload.Step),
        ("KVO_FLAG_", offload.Flag),
        ("KVO_CAP_", offload.Capability),
        ("KVO_CODEC_", offload.CodecId),
    ],
)
def test_numbers_are_those_of_the_header(prefix: str, enum: type[offload.Status]) -> None:
    found = re.findall(rf"\b{prefix}(\w+) = (1 << \d+|\d+)", HEADER.read_text())
    theirs = {name: 1 << int(v.rpartition("<")[2]) if "<<" in v else int(v) for name, v in found}
    ours = {member.name: int(member) for member in enum if member.name != "OK"}
    assert theirs == ours
    assert f"KVO_ABI_MAJOR {offload.ABI_MAJOR}\n#define KVO_ABI_MINOR {offload.ABI_MINOR}\n" in HEADER.read_text()


def narrowed() -> bytes:
    width = kvstrata_native.width_of(NOISE[: 2 * FROM_BYTES], 2)
    raw = NOISE[: 2 * FROM_BYTES]
    into, back = np.zeros(narrowed_bytes_max(raw.nbytes, 2), np.uint8), np.zeros_like(raw)
    filled = kvstrata_native.narrow(into, raw, 2, width)
    assert kvstrata_native.widen(back, into[:filled], 2, width)
    assert np.array_equal(back, raw)
    assert not kvstrata_native.widen(back, into[: filled // 2], 2, width)
    return into[:filled].tobytes()


def floats() -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    wide = np.random.default_rng(4).normal(0, 1, FROM_BYTES).astype(np.float32)
    return (wide.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)


def mixed() -> bytes:
    raw = floats()
    mixing = Mixing(raw.nbytes // 4096, 16, 128, kvstrata_native.width_of(raw, 2), 0.05)
    into, rungs = np.zeros(mixing.room_bytes(), np.uint8), np.zeros(mixing.planes, np.uint8)
    errors, back = np.zeros(mixing.planes), np.zeros_like(raw)
    filled = kvstrata_native.mix(into, raw, rungs, errors, mixing)
    assert kvstrata_native.unmix(back, into[:filled], mixing)
    return into[:filled].tobytes() + rungs.tobytes() + errors.tobytes() + back.tobytes()


def packed() -> bytes:
    raw, packing = floats(), Packing(Kind.INT4, 128, 128, is_by_column=False)
    rows = raw.nbytes // 256
    codes, back = np.zeros(packing.codes_bytes(rows), np.uint8), np.zeros_like(raw)
    scales = np.zeros(packing.scales_bytes(rows) // 2, np.uint16)
    assert kvstrata_native.pack(codes, scales, raw, packing)
    kvstrata_native.unpack(back, codes, scales, packing)
    endless = raw.copy()
    endless.view(np.uint16)[7] = 0x7F80
    assert not kvstrata_native.pack(codes.copy(), scales.copy(), endless, packing)
    return codes.tobytes() + scales.tobytes() + back.tobytes()


def copied() -> bytes:
    into = np.zeros_like(NOISE)
    kvstrata_native.copy(into, NOISE)
    assert np.array_equal(into, NOISE)
    into[:] = 0
    made = kvstrata_native.copy_digests(into, NOISE, 5, 6)
    assert np.array_equal(into, NOISE)
    others = [np.zeros_like(NOISE) for _ in range(4)]
    each = kvstrata_native.copy_digest_each([(o, NOISE, i) for i, o in enumerate(others)], 2)
    assert all(np.array_equal(o, NOISE) for o in others)
    sound = kvstrata_native.copy_sound([(others[0], NOISE, 5, 6, made[0]), (others[1], NOISE, 5, 6, bytes(16))])
    pairs = kvstrata_native.digest_pairs([(NOISE, 8, 9)])
    return b"".join([*made, *each, *sound, *pairs[0], kvstrata_native.xxh3_128(NOISE, 7)])


WORKS: list[Callable[[], bytes]] = [copied, narrowed, mixed, packed]


@pytest.mark.parametrize("work", WORKS)
def test_kernels_through_the_reference_do_the_same_to_the_bit(work: Callable[[], bytes]) -> None:
    wanted = work()
    assert offload.engage(REFERENCE).label == "reference"

    assert work() == wanted

    seen = offload.engaged()
    assert (seen.fallbacks, seen.why_lost) == (0, "")
    assert seen.descriptors > 0


def test_small_blocks_are_not_the_engines() -> None:
    offload.engage(REFERENCE)
    kvstrata_native.copy_digest(np.zeros(FROM_BYTES - 1, np.uint8), NOISE[: FROM_BYTES - 1])
    assert offload.engaged().descriptors == 0
    kvstrata_native.copy_digest(np.zeros(FROM_BYTES, np.uint8), NOISE[:FROM_BYTES])
    assert (offload.engaged().descriptors, offload.engaged().size_bytes) == (1, FROM_BYTES)


@pytest.mark.parametrize("work", WORKS)
def test_what_an_engine_fails_at_the_processor_does(tmp_path: Path, work: Callable[[], bytes]) -> None:
    wanted = work()
    assert offload.engage(stub(tmp_path, "FAILS")).label == "stub 0.5"

    assert work() == wanted

    seen = offload.engaged()
    assert seen.descriptors == 0
    assert seen.fallbacks > 0
    assert seen.why_lost == ""


@pytest.mark.parametrize(
    ("macro", "why"),
    [
        ("OVERFILLS", "filled more than there was room for"),
        ("OTHER_TAG", "did not complete what it had accepted"),
        ("LIES", "not that of what it wrote"),
    ],
)
def test_an_engine_that_breaks_the_rules_is_given_up_and_nothing_is_wrong(tmp_path: Path, macro: str, why: str) -> None:
    offload.engage(stub(tmp_path, macro))
    into = np.zeros_like(NOISE)

    told = kvstrata_native.copy_digest(into, NOISE, 5)

    seen = offload.engaged()
    assert why in seen.why_lost
    assert seen.label == "stub 0.5 (lost)"
    assert np.array_equal(into, NOISE)
    offload.engage(KERNELS)
    assert told == kvstrata_native.xxh3_128(NOISE, 5)


def test_engines_that_are_engaged_at_once_follow_each_other(tmp_path: Path) -> None:
    into = np.zeros_like(NOISE)
    offload.engage(stub(tmp_path, "SLOW"))

    with ThreadPoolExecutor(3) as threads:
        copy = threads.submit(kvstrata_native.copy, into, NOISE)
        time.sleep(0.05)
        ends = [threads.submit(offload.engage, REFERENCE) for _ in range(2)]
        assert [end.result().name for end in ends] == [REFERENCE] * 2
        copy.result()

    assert np.array_equal(into, NOISE)
    kvstrata_native.copy(into, NOISE[::-1].copy())
    assert offload.engaged().descriptors == 1


def test_a_name_in_another_encoding_is_shown_as_far_as_it_goes(tmp_path: Path) -> None:
    assert offload.engage(stub(tmp_path, "LATIN_NAME")).label == "st\ufffdb 0.5"


@pytest.mark.parametrize(
    ("macro", "said"),
    [
        ("OTHER_MAJOR", "interface 7.3"),
        ("NO_DEVICE", "open: status 17"),
        ("NO_LIMITS", "limits that are none"),
        ("REGISTERED_ONLY", "registered memory alone"),
    ],
)
def test_a_library_that_cannot_be_used_is_refused_and_the_engine_stays(tmp_path: Path, macro: str, said: str) -> None:
    offload.engage(REFERENCE)
    with pytest.raises(OffloadError, match=said):
        offload.engage(stub(tmp_path, macro))
    assert offload.engaged().name == REFERENCE


def test_another_major_version_is_refused_with_both_named(tmp_path: Path) -> None:
    library = stub(tmp_path, "OTHER_MAJOR")
    with pytest.raises(OffloadError, match=r"interface 7\.3 .*1\.0") as refused:
        offload.open_library(Path(library))
    assert refused.value.status is Status.VERSION
    with pytest.raises(OffloadError, match=r"interface 7\.3 .*1\.0"):
        offload.engage(library)


@pytest.mark.parametrize("path", ["/nonexistent/engine.so", str(HEADER)])
def test_what_is_no_library_is_named(path: str) -> None:
    for use in (lambda: offload.open_library(Path(path)), lambda: offload.engage(path)):
        with pytest.raises(OffloadError, match=re.escape(path)):
            use()


def test_a_library_without_the_interface_is_named() -> None:
    with pytest.raises(OffloadError, match="exports no kvstrata_offload_api"):
        offload.open_library(Path(_ctypes.__file__))


def test_a_device_in_python_has_the_rules_of_the_interface() -> None:
    device = offload.open_reference()
    queue = device.queue(2)
    source, into = NOISE[:5000].copy(), np.zeros(5000, np.uint8)
    sides = [Segment(source.ctypes.data, 5000, 0)], [Segment(into.ctypes.data, 5000, 0)]

    assert queue.submit([descriptor(Step.COPY | Step.DIGEST, *sides, tag=t, seeds=(9,)) for t in range(3)]) == 2
    with pytest.raises(OffloadError, match="close: BUSY"):
        device.close()
    assert queue.cancel(1) is Status.OK
    first, second = queue.poll(4)
    assert (first.tag, first.status, second.tag, second.status) == (0, Status.OK, 1, Status.CANCELLED)
    assert offload.digest_of(first) == kvstrata_native.xxh3_128(source, 9)
    assert np.array_equal(source, into)
    assert device.counters().cancelled == 1
    with pytest.raises(OffloadError, match="LIMIT"):
        device.queue(device.description.depth_max + 1)
    queue.close()
    queue.close()
    device.close()
    device.close()


def test_kernels_of_a_level_are_the_references() -> None:
    with pytest.raises(OffloadError, match="open: INVALID"):
        offload.open_reference("no such level")
    offload.open_reference("scalar").close()


@pytest.mark.parametrize("kind", Kind)
def test_groups_of_columns_may_be_longer_than_these(kind: Kind) -> None:
    rows, packing = 5, Packing(kind, 32, 5, is_by_column=True)
    x = np.random.default_rng(1).standard_normal(rows * packing.columns).astype(np.float32).view(np.uint16)[1::2].copy()
    codes = np.zeros(packing.codes_bytes(rows), np.uint8)
    scales, back = np.zeros(packing.scales_bytes(rows), np.uint8), np.zeros_like(x)
    device = offload.open_reference()
    queue = device.queue(2)
    raw, stored, into = (
        [Segment(a.ctypes.data, a.nbytes, 0) for a in part] for part in ((x,), (codes, scales), (back,))
    )
    longest = offload.Parameters(kind=kind, is_by_column=1, columns=packing.columns, group=(1 << 64) - 1)
    how = {"codec": offload.CodecId.PACK, "parameters": longest}

    assert (
        queue.submit([descriptor(Step.ENCODE, raw, stored, **how), descriptor(Step.DECODE, stored, into, **how)]) == 2
    )
    assert [one.status for one in queue.poll(2)] == [Status.OK, Status.OK]

    queue.close()
    device.close()
    wanted = bytearray(codes.nbytes), bytearray(scales.nbytes)
    kvstrata_native.pack(*wanted, x, packing)
    assert [codes.tobytes(), scales.tobytes()] == [bytes(part) for part in wanted]
    decoded = np.zeros_like(x)
    kvstrata_native.unpack(decoded, *wanted, packing)
    assert np.array_equal(back, decoded)
