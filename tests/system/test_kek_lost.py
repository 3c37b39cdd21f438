"""docs/backup.md: KEKs are saved, lost and put back by its commands, and data keys are the same afterwards."""

import asyncio
import base64
import re
import subprocess
from pathlib import Path

import pytest

from controlplane import ApiError, ControlPlane
from kvstrata_api import names
from kvstrata_api.wrapping import keks_of_entries
from support.kube.objects import GROUP, SYSTEM, custom, eventually
from support.operator.process import Replica

pytestmark = pytest.mark.system

TEXT = (Path(__file__).parents[2] / "docs" / "backup.md").read_text()
SAVE, PUT_BACK = re.findall(
    r"^ *(kubectl -n kvstrata-system (?:get|patch) secret kvstrata-kek .*)$", TEXT, re.MULTILINE
)
SECRETS = f"/api/v1/namespaces/{SYSTEM}/secrets"
ACCOUNTS = {"serviceAccounts": [{"namespace": "lost", "name": "engine"}]}


def entries(plane: ControlPlane, secret: str) -> dict[str, bytes]:
    """What a Secret holds; nothing where it is not there."""
    try:
        data = plane.api.get(f"{SECRETS}/{secret}").get("data", {})
    except ApiError:
        return {}
    return {name: base64.b64decode(value) for name, value in data.items()}


def wrapped(plane: ControlPlane) -> str:
    """The tenant's data key as it is kept."""
    return entries(plane, names.scope_secret_name("tenant", "lost")).get("v1.data", b"").decode()


def run(plane: ControlPlane, command: str, folder: Path) -> None:
    """Run a line of the page as an administrator who has kubectl."""
    path = f"{plane.kubectl_path.parent}:/usr/bin:/bin"
    environ = {"PATH": path, "KUBECONFIG": str(plane.kubeconfig), "HOME": str(folder)}
    subprocess.run(["bash", "-ec", command], cwd=folder, env=environ, check=True, timeout=60, capture_output=True)


async def test_a_kek_that_was_lost_and_is_put_back_opens_what_it_wrapped(
    plane: ControlPlane, operator_config: Path, tmp_path: Path
) -> None:
    operator = await asyncio.to_thread(Replica, operator_config, tmp_path)
    try:
        plane.api.post(f"{GROUP}/kvtenants", custom("KVTenant", "lost", ACCOUNTS))
        await eventually(lambda: wrapped(plane).startswith("k1:"))
        first = entries(plane, names.KEK_SECRET)
        key = keks_of_entries(first).unwrap(wrapped(plane))
        assert key is not None
        run(plane, SAVE, tmp_path)

        plane.api.delete(f"{SECRETS}/{names.KEK_SECRET}")
        await eventually(lambda: entries(plane, names.KEK_SECRET).keys() == {"k2"})
        assert wrapped(plane).startswith("k1:"), "what the lost one wrapped waits for it"

        run(plane, PUT_BACK, tmp_path)
        await eventually(lambda: wrapped(plane).startswith("k2:"))
        both = entries(plane, names.KEK_SECRET)
        assert both.keys() == {"k1", "k2"}
        assert both["k1"] == first["k1"]
        assert keks_of_entries(both).unwrap(wrapped(plane)) == key
    finally:
        operator.process.kill()
        operator.process.wait()
