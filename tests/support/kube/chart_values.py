"""Values that the chart is tried with, and what Helm makes of them."""

import json
import subprocess
from pathlib import Path
from typing import Any

import yaml

from controlplane.assets import find_tool
from support.kube.chart_agents import daemon_set, redis_set, template_of

ROOT = Path(__file__).resolve().parents[3]
CHART = ROOT / "charts" / "kvstrata"
NAMESPACE = "kvstrata-system"

Object = dict[str, Any]

KEK_VOLUME = {"csi": {"driver": "secrets-store.csi.k8s.io", "readOnly": True}}
EXTRA: Object = {
    "priorityClassName": "high",
    "podAnnotations": {"example.org/team": "inference"},
    "extraEnv": [{"name": "EXTRA", "value": "1"}],
    "extraVolumes": [{"name": "extra", "configMap": {"name": "extra"}}],
    "extraVolumeMounts": [{"name": "extra", "mountPath": "/extra", "readOnly": True}],
}
"""What any part can be given beside its own."""
EVERYTHING = {
    "namespace": {"create": True, "labels": {"pod-security.kubernetes.io/warn": "restricted"}},
    "metadata": {"replicas": 2},
    "redis": {"persistence": {"enabled": True, "storageClassName": "fast"}},
    "agent": {
        "image": {"repository": "kvstrata/agent", "digest": "sha256:" + "1" * 64},
        "hostPaths": {"memory": "/run/kvstrata-memory"},
    },
    "commonLabels": {"team": "inference"},
    "kek": {"file": "/run/kvstrata-kek/keks", "volume": KEK_VOLUME},
    "tracing": {"otlpEndpoint": "http://collector.monitoring:4318/v1/traces", "ratio": 0.1, "slowSeconds": 2},
    "networkPolicy": {"enabled": True, "metricsFrom": [{"namespaceSelector": {}}]},
    "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
    "prometheusRule": {"enabled": True, "runbookBaseUrl": "https://example.org/kvstrata/"},
    "grafanaDashboard": {"enabled": True, "annotations": {"grafana_folder": "LLM"}},
    "image": {"registry": "registry.example.org", "pullSecrets": [{"name": "pull"}]},
    "operator": {
        "image": {"repository": "kvstrata/operator", "digest": "sha256:" + "0" * 64},
        "tolerations": [{"key": "infra", "operator": "Exists"}],
        "affinity": {"nodeAffinity": {}},
        "extraArgs": ["--resync-s=30"],
    },
}
QUICKSTART: Object = yaml.safe_load((CHART / "values-quickstart.yaml").read_text())
CASES: dict[str, Object] = {
    "defaults": {},
    "everything": EVERYTHING,
    "only rights": {"processes": {"enabled": False}, "namespace": {"create": True}},
    "external redis": {"redis": {"mode": "External", "existingSecrets": {"agent": "a", "metadata": "m"}}},
    "redis as a child": {
        "redis": {"mode": "Process"},
        "metadata": {"replicas": 3},
        "networkPolicy": {"enabled": True},
    },
    "node preparation": {
        "nodePreparation": {
            "enabled": True,
            "image": {"digest": "sha256:" + "2" * 64},
            "keepFree": {"2Mi": 512},
            "dax": {"devices": ["dax0.*"], "giveBack": True},
            "seLinuxOptions": {"type": "spc_t"},
        },
        "networkPolicy": {"enabled": True},
    },
    "quickstart": QUICKSTART,
    "extras": {
        **dict.fromkeys(("operator", "metadata", "agent", "redis"), EXTRA),
        "nodePreparation": {"enabled": True, "image": {"digest": "sha256:" + "2" * 64}, **EXTRA},
    },
    "no crds": {"crds": {"install": False}, "userRoles": {"create": False}, "podDisruptionBudget": {"enabled": False}},
}
WORKLOADS = ("Deployment", "StatefulSet")


def helm(*args: str, values: Object | None = None) -> subprocess.CompletedProcess[str]:
    command = [str(find_tool("helm")), *args, "--values", "-"]
    return subprocess.run(command, input=json.dumps(values or {}), text=True, capture_output=True, check=False)


def render(values: Object) -> list[Object]:
    """Objects that the chart makes of these values."""
    done = helm("template", "kvstrata", str(CHART), "--namespace", NAMESPACE, values=values)
    assert done.returncode == 0, done.stderr
    return [document for document in yaml.safe_load_all(done.stdout) if document]


def foreign(objects: list[Object]) -> list[Object]:
    """Return those of kinds that somebody else defines: ours are there once the chart is."""
    return [o for o in objects if not o["apiVersion"].startswith("kvstrata.io/")]


def of_kind(objects: list[Object], *kinds: str) -> list[Object]:
    return [o for o in objects if o["kind"] in kinds]


def workloads(objects: list[Object]) -> list[Object]:
    """What runs with a pool `llama-70b`."""
    return [*of_kind(objects, *WORKLOADS), *redis_set(objects), daemon_set(template_of(objects), "llama-70b")]
