"""Namespace, identities and RBAC as the chart renders them; the CRDs come from their source."""

import subprocess
from pathlib import Path

from controlplane import ControlPlane
from controlplane.assets import find_tool
from kvstrata_api import names

ROOT = Path(__file__).resolve().parents[3]


def render_rights() -> str:
    """Manifests of everything that the processes' identities need, without the processes."""
    chart = str(ROOT / "charts/kvstrata")
    command = [str(find_tool("helm")), "template", "kvstrata", chart, "--namespace", names.SYSTEM_NAMESPACE]
    settings = ["--set", "processes.enabled=false,namespace.create=true,crds.install=false"]
    return subprocess.run([*command, *settings], text=True, capture_output=True, check=True).stdout


def install_kinds(plane: ControlPlane, rights: str) -> None:
    """Bring CRDs and rights onto a plane and wait until the kinds are served."""
    plane.kubectl("apply", "--server-side", "-f", str(ROOT / "crds"))
    plane.kubectl("wait", "--for=condition=Established", "crd", "--all", "--timeout=90s")
    plane.kubectl("apply", "--server-side", "-f", "-", stdin=rights)
