"""What tests need: one control plane for a whole session, and a namespace of its own for each test."""

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from controlplane.plane import ControlPlane
from controlplane.run import start


def session_plane(state_dir: Path) -> Iterator[ControlPlane]:
    """Start one plane, yield it, stop it: the body of a session-scoped fixture.

    It ends with the test process even when that is killed, so a cut run leaves nothing behind.

        @pytest.fixture(scope="session")
        def plane(tmp_path_factory):
            yield from session_plane(tmp_path_factory.mktemp("plane"))
    """
    with start(state_dir) as plane:
        yield plane


@contextmanager
def scratch_namespace(plane: ControlPlane, prefix: str = "test") -> Iterator[str]:
    """Create a namespace that nobody else uses, and delete it afterwards without waiting for the end."""
    name = f"{prefix}-{secrets.token_hex(4)}"
    plane.api.post("/api/v1/namespaces", {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
    try:
        yield name
    finally:
        plane.api.delete(f"/api/v1/namespaces/{name}")
