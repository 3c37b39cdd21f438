"""One cluster of two real nodes for all of these tests, with the chart and a pool on it. Tests run in file order."""

import json
import os
import resource
from collections.abc import Iterator

import pytest
from node import manifests
from node.fleet import ARCHIVES, IMAGES, LONG_S, ROOT, TEAMS, Fleet

import nodes
from nodes.provisioning import HUGE_PAGES
from nodes.starting import missing
from support.runner import leftovers

TRANSCRIPT = ROOT / "build" / "test-node.log"


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[nodes.Cluster]:
    """Two nodes with the images of `make images`."""
    if lack := missing():
        pytest.skip(lack)
    archives = [IMAGES / f"{name}.tar" for name in ARCHIVES.values()]
    if absent := [path.name for path in archives if not path.exists()]:
        pytest.skip(f"{IMAGES} lacks {', '.join(absent)}: make images")
    leftovers.share()  # It serves every file of these tests.
    try:
        started = nodes.start(tmp_path_factory.mktemp("nodes"), nodes=2, huge_pages=manifests.HUGE_PAGES)
    finally:
        leftovers.unshare()
    with started as cluster:
        for archive in archives:
            cluster.load_image(archive)
        yield cluster


@pytest.fixture(scope="session")
def bare(cluster: nodes.Cluster, tmp_path_factory: pytest.TempPathFactory) -> Fleet:
    """Nodes without kvstrata, but with what an administrator prepares for it."""
    TRANSCRIPT.parent.mkdir(exist_ok=True)
    TRANSCRIPT.write_text("")
    fleet = Fleet(cluster, TRANSCRIPT, tmp_path_factory.mktemp("fleet"))
    fleet.kubectl("label", "node", "--all", f"kvstrata.io/pool={manifests.POOL}")
    for path in manifests.HOST_PATHS.values():
        cluster.make_folder(f"{path}/{manifests.POOL}")
    return fleet


@pytest.fixture(scope="session")
def fleet(bare: Fleet) -> Fleet:
    """The chart, a pool that is Ready, two tenants, and an engine of the first on each node."""
    bare.install(HUGE_PAGES)
    bare.kubectl("apply", "-f", "-", stdin=json.dumps(manifests.pool()))
    quickstart = ROOT / "examples" / "01-quickstart"
    for path in sorted(quickstart.glob("*.yaml")):
        if "pool" not in path.name:
            bare.kubectl("apply", "-f", str(path))
    bare.kubectl("wait", "--for=condition=Ready", f"kvpool/{manifests.POOL}", f"--timeout={LONG_S:.0f}s")
    bare.kubectl(
        "wait", "--for=create", "-n", "kvstrata-system", "statefulset/kvstrata-redis", f"--timeout={LONG_S:.0f}s"
    )
    bare.kubectl("rollout", "status", "-n", "kvstrata-system", "statefulset/kvstrata-redis", f"--timeout={LONG_S:.0f}s")
    for node in bare.cluster.nodes:
        bare.engine(TEAMS[0], node.name, node.name)
    bare.show()
    return bare


def pytest_sessionfinish() -> None:
    """Say what the processes of the cluster needed at most."""
    if TRANSCRIPT.exists():
        peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
        with TRANSCRIPT.open("a") as file:
            file.write(f"# largest process {peak >> 10} MiB, load {os.getloadavg()[0]:.1f} at the end\n")
