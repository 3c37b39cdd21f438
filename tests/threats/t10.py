"""T10: nothing at rest is readable once its scope is shredded, and nothing of a prompt or a name before.

Blocks full of canaries lie on NVMe, shared flash and in an object store, under the agent's real keyring. Their owners'
names are canaries, too. Before the shred no canary is in any file or file name. Then the Secret goes, or its data key:
0 blocks decrypt, in the store that is up, in one that starts later, and by hand with everything else that there is.
"""

import asyncio
import hashlib
import tempfile
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Final

from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from kvstrata_agent.backends.base import Record, SealingBackend, SlotRef
from kvstrata_agent.backends.file.index_file import INDEX_FILE
from kvstrata_agent.backends.file.open_store import open_nvme, open_remote_flash
from kvstrata_agent.backends.object.client import ObjectClient
from kvstrata_agent.backends.object.object_tier import open_object_tier
from kvstrata_agent.backends.record.layout import HEADER_BYTES, MAGIC
from kvstrata_agent.kube.data_keys import Keyring
from kvstrata_api.blocks import ScopeId
from kvstrata_api.errors import BackendFailedError, BlockCorruptError
from kvstrata_api.models.pool import NvmeTier, RemoteFlashTier
from kvstrata_api.units import MIB
from kvstrata_api.wrapping import Keks
from support.backends.contract import record
from support.kube.scope_secrets import ScopeSecrets
from support.runner import leftovers
from support.runner.outcome import Outcome, Scale

CAPACITY_BYTES: Final = 24 * MIB
BLOCK_BYTES: Final = 8 << 10
SHREDDED: Final = ScopeId("tenant/canary-acme/uid-canary-acme/v1")
OTHER: Final = ScopeId("domain/canary-globex/uid-canary-globex/v2")
DIGESTS_MAX: Final = 50
"""Of so many blocks the digests are looked for as well, raw and in hexadecimal digits."""

CANARIES: Final = (b"CANARY", b"canary", b"acme", b"globex", b"lossless")

Open = Callable[[Path, Keyring | None], Awaitable[SealingBackend]]


async def _nvme(path: Path, keys: Keyring | None) -> SealingBackend:
    return await open_nvme(NvmeTier(path=str(path), io="Posix"), "pool", "node", CAPACITY_BYTES, keys=keys)


async def _flash(path: Path, keys: Keyring | None) -> SealingBackend:
    return await open_remote_flash(RemoteFlashTier(path=str(path)), "pool", "node", CAPACITY_BYTES, keys=keys)


async def _objects(path: Path, keys: Keyring | None) -> SealingBackend:
    return await open_object_tier(ObjectClient(f"file://{path}/o"), "pool", "node", CAPACITY_BYTES, keys=keys)


MEDIA: Final[dict[str, Open]] = {"NVMe": _nvme, "RemoteFlash": _flash, "Object": _objects}


def run(scale: Scale) -> Outcome:
    """Shred scopes on every medium; see that canaries are found and blocks are read where nothing forbids it."""
    blocks = scale.of(500, 6)
    trials = [asyncio.run(_tried(name, blocks, loss)) for name in MEDIA for loss in LOSSES]
    in_the_clear = [asyncio.run(_canaries_in_the_clear(name)) for name in MEDIA]
    wrong = tuple(w for trial in trials for w in trial.wrong)
    values = {
        "decrypted_after": float(sum(t.decrypted for t in trials)),
        "canaries": float(sum(t.canaries for t in trials)),
        "read_with_key": float(sum(t.read_with_key for t in trials)),
        "canaries_in_the_clear": float(sum(in_the_clear)),
    }
    is_caught = all(t.read_with_key == t.blocks == 2 * t.opened_by_hand for t in trials) and all(in_the_clear)
    return Outcome(sum(t.tried for t in trials), "blocks tried after a shred", wrong, is_caught, values)


def content(scope: ScopeId, number: int) -> memoryview:
    """Bytes of a block that say what prompt they are of."""
    said = f"CANARY prompt {number} of {scope}: my PIN is {number:04d}. ".encode()
    return memoryview((said * (BLOCK_BYTES // len(said) + 1))[:BLOCK_BYTES])


@dataclass(slots=True)
class Trial:
    """What was seen on one medium."""

    name: str
    blocks: int = 0
    tried: int = 0
    decrypted: int = 0
    canaries: int = 0
    read_with_key: int = 0
    opened_by_hand: int = 0
    """Blocks of the shredded scope that its key, kept aside for this, does open."""
    wrong: list[str] = field(default_factory=list)

    def find(self, path: Path, when: str, held: Iterable["Held"]) -> None:
        """Look for canaries and digests in every file and name."""
        digests = [made.key.digest for _, made, _ in islice(held, DIGESTS_MAX)]
        whole = everything(path)
        wanted = [*CANARIES, *digests, *(d.hex().encode() for d in digests)]
        found = [w for w in wanted if w in whole]
        self.canaries += len(found)
        self.wrong += [f"{self.name}, {when}: {w!r} is on the medium" for w in found]

    async def read(self, backend: SealingBackend, held: Iterable["Held"], when: str) -> None:
        """Try to read blocks that nobody must be able to read."""
        for slot, made, said in held:
            self.tried += 1
            into = bytearray(BLOCK_BYTES)
            with suppress(BlockCorruptError, BackendFailedError):
                await backend.read(slot, made, memoryview(into))
            if any(into):
                self.decrypted += 1
                self.wrong.append(f"{self.name}, {when}: {bytes(into[:32])!r} was read, {said[:8]!r}")


Held = tuple[SlotRef, Record, bytes]


def everything(path: Path) -> bytes:
    """All names and bytes below a directory."""
    files = [p for p in sorted(path.rglob("*")) if p.is_file()]
    return b"\n".join([str(p.relative_to(path)).encode() for p in files] + [p.read_bytes() for p in files])


async def _fill(backend: SealingBackend, scope: ScopeId, blocks: int) -> list[Held]:
    held = []
    for number in range(blocks):
        said = content(scope, number)
        slot = backend.reserve(scope, BLOCK_BYTES)
        made = record(0xCA9A12 + number, said, slot, scope)
        await backend.write(slot, made, said)
        held.append((slot, made, bytes(said)))
    return held


async def _tried(name: str, blocks: int, loss: "Loss") -> Trial:
    trial, secrets = Trial(f"{name}, {loss.__name__}", blocks=2 * blocks), ScopeSecrets()
    secrets.make(SHREDDED, OTHER)
    with tempfile.TemporaryDirectory(prefix="kvstrata-t10-", dir=leftovers.memory()) as folder:
        path = Path(folder)
        backend = await MEDIA[name](path, secrets.keyring)
        held = await _fill(backend, SHREDDED, blocks)
        kept = await _fill(backend, OTHER, blocks)
        await _read_with_key(trial, backend, (*held, *kept))
        trial.find(path, "before the shred", held)
        key = secrets.keyring.data_key(SHREDDED)
        loss(secrets)
        if key is None or any(key):
            trial.wrong.append(f"{trial.name}: the key is still in memory")
        await trial.read(backend, held, "after the shred")
        await backend.close()
        trial.find(path, "closed", (*held, *kept))
        await _after_restart(trial, path, secrets, held, len(kept))
    return trial


async def _read_with_key(trial: Trial, backend: SealingBackend, held: Iterable[Held]) -> None:
    for slot, made, said in held:
        into = bytearray(BLOCK_BYTES)
        await backend.read(slot, made, memoryview(into))
        trial.read_with_key += bytes(into) == said


async def _after_restart(trial: Trial, path: Path, secrets: ScopeSecrets, held: list[Held], kept: int) -> None:
    """Start without and with an index, and open by hand; the other scope's blocks are all there."""
    name = trial.name.split(",")[0]
    _try_by_hand(trial, path, secrets, len(held))
    for is_indexed in (True, False):
        if not is_indexed:
            _remove_index(path)
        backend = await MEDIA[name](path, secrets.keyring)
        found = [(slot, made, b"") async for slot, made in backend.recover()]
        # An index that was closed under another data key may list them: to no avail.
        await trial.read(backend, (f for f in found if f[1].key.scope == SHREDDED), "found again")
        of_other = sum(made.key.scope == OTHER for _, made, _ in found)
        if of_other != kept:
            trial.wrong.append(f"{trial.name}: a start finds {of_other} of {kept} blocks of the other scope")
        await trial.read(backend, held, "after a restart")
        await backend.close()


def _remove_index(path: Path) -> None:
    for index in path.rglob(INDEX_FILE):
        index.unlink()


def _try_by_hand(trial: Trial, path: Path, secrets: ScopeSecrets, blocks: int) -> None:
    """Open what lies there with every key that is left, whatever its tag says; then with the one that is gone."""
    whole = everything(path)
    left = [secrets.data_keys[OTHER], *secrets.keks.keys.values(), bytes(32)]
    left += [said.partition(b":")[2] or said for said in secrets.left(SHREDDED).values()]
    for key in left:
        trial.tried += blocks
        opened = sum(SHREDDED.encode() in said for said in _opened(whole, key))
        trial.decrypted += opened
        trial.wrong += [f"{trial.name}: {opened} blocks were opened by hand"] if opened else []
    trial.opened_by_hand += sum(SHREDDED.encode() in said for said in _opened(whole, secrets.gone))


def _opened(whole: bytes, data_key: bytes) -> Iterator[bytes]:
    """First bytes of every payload as a data key opens them."""
    at = whole.find(MAGIC)
    while at >= 0:
        salt, sealed = whole[at + 48 : at + 80], whole[at + HEADER_BYTES : at + HEADER_BYTES + 128]
        derived = hashlib.blake2b(salt, key=data_key[:64], digest_size=32, person=b"kvstrata.seal").digest()
        yield Cipher(algorithms.AES256(derived), modes.GCM((2).to_bytes(12, "big"))).decryptor().update(sealed)
        at = whole.find(MAGIC, at + 1)


async def _canaries_in_the_clear(name: str) -> int:
    """Control: without encryption the same canaries are found."""
    with tempfile.TemporaryDirectory(prefix="kvstrata-t10-", dir=leftovers.memory()) as folder:
        backend = await MEDIA[name](Path(folder), None)
        await _fill(backend, SHREDDED, 3)
        await backend.close()
        return sum(canary in everything(Path(folder)) for canary in CANARIES)


def secret_deleted(secrets: ScopeSecrets) -> None:
    """The tenant or domain is deleted, and its Secret with it."""
    secrets.delete(SHREDDED)


def data_key_deleted(secrets: ScopeSecrets) -> None:
    """The entry with the wrapped data key is removed alone."""
    entries = secrets.entries(SHREDDED)
    del entries["v1.data"]
    secrets.write(SHREDDED, entries)


def data_key_replaced(secrets: ScopeSecrets) -> None:
    """Another data key stands in its place, as after the operator has noticed that it is missing."""
    kept = secrets.entries(SHREDDED)["v1"]
    secrets.make(SHREDDED)
    secrets.write(SHREDDED, {**secrets.entries(SHREDDED), "v1": kept})


def keks_deleted(secrets: ScopeSecrets) -> None:
    """The KEK that wraps the scope's data key is gone, and another one wraps those of others."""
    data_key = secrets.data_keys[OTHER]
    keks = Keks({2: b"2" * 32})
    secrets.turn_keks(keks)
    secrets.write(OTHER, {**secrets.entries(OTHER), "v2.data": keks.wrap(data_key).encode()})


Loss = Callable[[ScopeSecrets], Any]

LOSSES: Final[tuple[Loss, ...]] = (secret_deleted, data_key_deleted, data_key_replaced, keks_deleted)
