"""What is applied to the cluster: the chart without its processes, and the examples."""

import subprocess
from pathlib import Path
from typing import Final

from controlplane import ControlPlaneError
from controlplane.assets import find_tool
from controlplane.supervision import snapshot
from demo.cluster import Cluster
from demo.errors import DemoError
from kvstrata_api.names import CA_NAMESPACE, SYSTEM_NAMESPACE, TRUST_CONFIG_MAP

ROOT: Final = Path(__file__).resolve().parents[2]
EXAMPLES: Final = ROOT / "examples"
HOST_PATH: Final = "/var/lib/kvstrata"
"""Directory on the node in the examples' manifests."""

CRDS: Final = (
    "kvpools", "kvpoolnodes", "kvtenants", "kvtrustdomains", "kvprefixshares", "kvoperations", "kvmodelcaches",
)  # fmt: skip
_HELM_S: Final = 60.0
_REMOVE_S: Final = 60.0


def render_chart(host_dir: Path) -> str:
    """Render custom resources, identities, rights and policies; the processes are started here instead.

    Tiers may lie below `host_dir`, which stands for the node's directory. Raises `DemoError`.
    """
    chosen = ("processes.enabled=false", "namespace.create=true", f"admissionPolicies.storagePaths={{{host_dir}}}")
    settings = tuple(word for one in chosen for word in ("--set", one))
    try:
        helm = find_tool("helm")
        command = (
            str(helm),
            "template",
            "kvstrata",
            str(ROOT / "charts" / "kvstrata"),
            "-n",
            SYSTEM_NAMESPACE,
            *settings,
        )
        done = subprocess.run(command, capture_output=True, text=True, env=snapshot(), timeout=_HELM_S, check=True)
    except subprocess.CalledProcessError as e:
        raise DemoError(f"helm template: {e.stderr.strip()}") from e
    except (ControlPlaneError, subprocess.TimeoutExpired) as e:
        raise DemoError(f"helm: {e}") from e
    return done.stdout


def install(cluster: Cluster, chart: str) -> None:
    """Apply a rendered chart and wait until the API server serves our kinds."""
    cluster.kubectl("apply", "--server-side", "--force-conflicts", "-f", "-", stdin=chart)
    named = [f"crd/{kind}.kvstrata.io" for kind in CRDS]
    cluster.kubectl("wait", "--for=condition=Established", "--timeout=30s", *named)


def apply_example(cluster: Cluster, name: str, host_dir: Path) -> None:
    """Apply an example as it stands, except that the node's directory is one that this user may write to."""
    files = sorted((EXAMPLES / name).glob("*.yaml"))
    assert files, f"no example {name}"
    text = "\n---\n".join(f.read_text() for f in files)
    cluster.kubectl("apply", "-f", "-", stdin=text.replace(HOST_PATH, str(host_dir)))


def remove_examples(cluster: Cluster) -> None:
    """Delete what the examples declare and wait until it is gone; the operator must still run, for its finalizers."""
    for example in ("02-trust-domain", "01-quickstart"):
        folder = str(EXAMPLES / example)
        cluster.kubectl("delete", "--ignore-not-found", f"--timeout={_REMOVE_S:.0f}s", "-f", folder)


def uninstall(cluster: Cluster) -> None:
    """Take the chart away again; custom resource definitions stay, as after `helm uninstall`."""
    rights = "clusterrole,clusterrolebinding,role,rolebinding,serviceaccount"
    kinds = f"{rights},validatingadmissionpolicybinding,validatingadmissionpolicy"
    selector = "app.kubernetes.io/part-of=kvstrata"
    cluster.kubectl("delete", kinds, "-n", SYSTEM_NAMESPACE, "-l", selector, "--ignore-not-found", "--wait=false")
    cluster.kubectl("delete", "namespace", CA_NAMESPACE, "--ignore-not-found", "--wait=false")
    cluster.kubectl("delete", "configmap", TRUST_CONFIG_MAP, "-n", SYSTEM_NAMESPACE, "--ignore-not-found")
