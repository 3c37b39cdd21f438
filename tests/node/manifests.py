"""What an administrator and two teams apply in these tests. Pure."""

import json
from pathlib import Path
from typing import Any, Final

POOL: Final = "demo"
PAGE_BYTES: Final = 2 << 20
DRAM_BYTES: Final = 128 << 20
HUGE_PAGES: Final = 200
"""Of the machine; both nodes show all of them, and both agents together take 128."""
HOST_PATHS: Final = {"state": "/var/lib/kvstrata", "sockets": "/run/kvstrata", "memory": "/run/kvstrata-memory"}
ENGINE_USER: Final = 1000
AGENT_GROUP: Final = 65532

Json = dict[str, Any]


def values(images: dict[str, Json], huge_pages: str) -> Json:
    """Values of the chart: images by digest, small requests, memory that outlives the agent."""
    small = {"requests": {"cpu": "50m", "memory": "64Mi"}, "limits": {"memory": "1Gi"}}
    parts: Json = {part: {"image": image, "resources": small} for part, image in images.items()}
    parts["agent"] |= {"hostPaths": HOST_PATHS | {"hugepages": huge_pages}, "terminationGracePeriodSeconds": 60}
    # The node that dies is the other one: what a directory's loss means is tested elsewhere.
    parts["redis"] |= {"nodeSelector": {"kubernetes.io/hostname": "node-1"}}
    return parts


def pool() -> Json:
    """DRAM on huge pages above a directory on the node's disk."""
    tiers = [
        {
            "name": "dram",
            "type": "HostDRAM",
            "capacityPerNode": f"{DRAM_BYTES >> 20}Mi",
            "hostDRAM": {"pageSize": "2Mi", "persistence": "AgentRestart"},
        },
        {
            "name": "nvme",
            "type": "NVMe",
            "capacityPerNode": "512Mi",
            "nvme": {"path": f"/var/lib/kvstrata/{POOL}/nvme"},
        },
    ]
    return {
        "apiVersion": "kvstrata.io/v1alpha1",
        "kind": "KVPool",
        "metadata": {"name": POOL},
        "spec": {
            "nodeSelector": {"kvstrata.io/pool": POOL},
            "compatibility": {"model": "demo/llama", "revision": "seed-1", "dtype": "bf16", "blockTokens": 16},
            "tiers": tiers,
            # A slow disk is read all the same: the engine is said to compute 100 tokens, of 32 KiB each, a second.
            "policy": {
                "admission": {"type": "Always"},
                "recompute": {"type": "CostModel", "prefillTokensPerSecond": 100},
            },
        },
    }


def script(namespace: str) -> Json:
    """The engine's program, as its pods mount it."""
    text = Path(__file__).with_name("engine.py").read_text()
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "engine", "namespace": namespace},
        "data": {"engine.py": text},
    }


def engine(namespace: str, name: str, node: str, image: str, *arguments: str) -> Json:
    """An engine's pod: its own ServiceAccount, its own token for kvstrata, and the socket of its pool, read-only."""
    sockets = {"path": f"{HOST_PATHS['sockets']}/{POOL}", "type": "Directory"}
    token = {"serviceAccountToken": {"audience": "kvstrata", "expirationSeconds": 600, "path": "token"}}
    mounts = {"sockets": "/run/kvstrata/demo", "token": "/var/run/secrets/kvstrata.io", "program": "/engine"}
    idle = ["-c", "import signal; signal.pause()"]
    container = {
        "name": "engine",
        "image": image,
        "imagePullPolicy": "Never",
        "command": ["python3.11", *(["/engine/engine.py", *arguments] if arguments else idle)],
        "volumeMounts": [{"name": n, "mountPath": path, "readOnly": True} for n, path in mounts.items()],
        "resources": {"requests": {"cpu": "50m", "memory": "64Mi"}},
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": namespace, "labels": {"kvstrata.io/pool": POOL}},
        "spec": {
            "serviceAccountName": "engine",
            "automountServiceAccountToken": False,
            "nodeSelector": {"kubernetes.io/hostname": node},
            "terminationGracePeriodSeconds": 0,
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": ENGINE_USER,
                "runAsGroup": ENGINE_USER,
                "supplementalGroups": [AGENT_GROUP],
            },
            "containers": [container],
            "volumes": [
                {"name": "sockets", "hostPath": sockets},
                {"name": "token", "projected": {"sources": [token]}},
                {"name": "program", "configMap": {"name": "engine"}},
            ],
        },
    }


def text(*objects: Json) -> str:
    """Objects as kubectl reads them."""
    return json.dumps({"apiVersion": "v1", "kind": "List", "items": objects})
