"""Tiers in memory that engines map, and memory that outlives its agent, under their contracts."""

import subprocess
import tempfile
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from kvstrata_agent.backends.base import TierBackend
from kvstrata_agent.backends.memory.cxl import open_cxl
from kvstrata_agent.backends.memory.host_dram import open_host_dram
from kvstrata_agent.backends.memory.persistence import PersistenceRoot, read_mounts
from kvstrata_api.models.pool import CxlEmulation, CxlTier, HostDramTier
from kvstrata_api.tiers import CxlMode
from kvstrata_api.units import MIB
from kvstrata_node.discovery import NumaNode
from support.backends import contract as backend_contract
from support.backends.contract import (
    CAPACITY_BYTES,
    PersistentContract,
)
from support.backends.mappable_contract import MappableContract
from support.runner import leftovers
from support.runner.huge_pages import more_huge_pages

pytestmark = pytest.mark.contract


class TestCxlNumaNode(MappableContract):
    """The machine's only node in place of a CPU-less one: the same binding calls, without the distance."""

    @pytest.fixture
    async def backend(self) -> AsyncIterator[TierBackend]:
        backend = open_cxl(CxlTier(mode=CxlMode.NUMA_NODE), CAPACITY_BYTES, (NumaNode(0, (), 1 << 30),))
        assert backend.capabilities.medium == "cxl-numa"
        yield backend
        await backend.close()


class TestHostDramSmallPages(MappableContract):
    @pytest.fixture
    async def backend(self) -> AsyncIterator[TierBackend]:
        backend = open_host_dram(HostDramTier(page_size="4Ki"), CAPACITY_BYTES, (0,))
        assert backend.capabilities.medium == "memfd-4Ki"
        yield backend
        await backend.close()


@pytest.fixture(scope="class")
def huge_pages() -> Iterator[None]:
    """64 huge pages while the tests of one class run; given back afterwards."""
    with more_huge_pages(64) as are_there:
        if not are_there:
            pytest.skip("no 128 MiB in one piece for huge pages here, or no root to reserve them")
        yield


@pytest.mark.usefixtures("huge_pages")
class TestHostDramHugePages(MappableContract):
    """32 pages for 2 MiB of the contract's blocks would be one page: every law holds at page granularity too."""

    @pytest.fixture
    async def backend(self, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[TierBackend]:
        for name, value in (("CAPACITY_BYTES", 64 * MIB), ("BLOCK_BYTES", MIB)):
            monkeypatch.setattr("support.backends.contract." + name, value)
        backend = open_host_dram(HostDramTier(page_size="2Mi"), 64 * MIB, (0,))
        assert backend.capabilities.medium == "memfd-2Mi"
        assert backend.capabilities.fallback == ""
        yield backend
        await backend.close()


@pytest.fixture
def memory_dir() -> Iterator[Path]:
    """A directory of a tmpfs."""
    with tempfile.TemporaryDirectory(prefix="kvstrata-test-", dir=leftovers.memory()) as directory:
        yield Path(directory)


class _LastingContract(PersistentContract, MappableContract):
    """Memory that outlives the agent has to keep both contracts. `where` holds the ledgers, and mostly the bytes."""

    medium: str

    @pytest.fixture
    def where(self, memory_dir: Path) -> Path:
        return memory_dir

    @pytest.fixture
    async def backend(self, where: Path) -> AsyncIterator[TierBackend]:
        backend = await self.reopen(where)
        assert backend.capabilities.medium == self.medium, backend.capabilities.fallback
        assert backend.persistent is backend
        assert backend.capabilities.outlives_agent
        assert not backend.capabilities.survives_restart
        yield backend
        await backend.close()

    def home(self, where: object) -> PersistenceRoot:
        return PersistenceRoot(Path(str(where)), "pool-a", "node-a", read_mounts(), "tier-a")


class TestLastingSmallPages(_LastingContract):
    medium = "tmpfs-4Ki"

    async def reopen(self, where: object) -> TierBackend:
        return open_host_dram(HostDramTier(page_size="4Ki"), backend_contract.CAPACITY_BYTES, (0,), self.home(where))


class TestLastingCxlNumaNode(_LastingContract):
    medium = "cxl-numa"

    async def reopen(self, where: object) -> TierBackend:
        tier, node = CxlTier(mode=CxlMode.NUMA_NODE), NumaNode(0, (), 1 << 30)
        return open_cxl(tier, backend_contract.CAPACITY_BYTES, (node,), self.home(where))


class TestLastingCxlEmulated(_LastingContract):
    medium = "emulated-cxl"

    async def reopen(self, where: object) -> TierBackend:
        emulation = CxlEmulation(path=f"{where}/emulated", latency_ns=350)
        tier = CxlTier(mode=CxlMode.EMULATED, emulated=emulation)
        return open_cxl(tier, backend_contract.CAPACITY_BYTES, (), self.home(where))


@pytest.fixture
def huge_mount(tmp_path: Path) -> Iterator[Path]:
    """A hugetlbfs of our own."""
    mounted = ["mount", "-t", "hugetlbfs", "-o", "pagesize=2M", "none", str(tmp_path)]
    if subprocess.run(mounted, check=False, capture_output=True).returncode:
        pytest.skip("hugetlbfs cannot be mounted here")
    yield tmp_path
    subprocess.run(["umount", "--lazy", str(tmp_path)], check=True)


@pytest.mark.usefixtures("huge_pages")
class TestLastingHugePages(_LastingContract):
    medium = "hugetlbfs-2Mi"

    @pytest.fixture(autouse=True)
    def _sizes(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name, value in (("CAPACITY_BYTES", 64 * MIB), ("BLOCK_BYTES", MIB)):
            monkeypatch.setattr("support.backends.contract." + name, value)

    @pytest.fixture
    def where(self, memory_dir: Path, huge_mount: Path) -> Path:
        self.mount = huge_mount
        return memory_dir

    async def reopen(self, where: object) -> TierBackend:
        home = self.home(where)
        mounts = [m for m in home.mounts if m.kind != "hugetlbfs" or m.path == self.mount]
        tier = HostDramTier(page_size="2Mi")
        return open_host_dram(tier, backend_contract.CAPACITY_BYTES, (0,), replace(home, mounts=mounts))


class TestCxlEmulated(MappableContract):
    @pytest.fixture
    async def backend(self, tmp_path: Path) -> AsyncIterator[TierBackend]:
        tier = CxlTier(mode=CxlMode.EMULATED, emulated=CxlEmulation(path=str(tmp_path), latency_ns=350))
        backend = open_cxl(tier, CAPACITY_BYTES, ())
        assert backend.capabilities.is_emulated
        assert backend.capabilities.medium == "emulated-cxl"
        yield backend
        await backend.close()
        assert not _names(tmp_path)


def _names(directory: Path) -> list[str]:
    return [entry.name for entry in directory.iterdir()]
