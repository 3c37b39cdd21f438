"""The chart on real nodes, and engines in pods. Every command and its answer is kept in a transcript."""

import json
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from node import manifests
from node.manifests import Json

from controlplane.assets import find_tool
from nodes import Cluster
from nodes.images import image_names

ROOT: Final = Path(__file__).resolve().parents[2]
IMAGES: Final = ROOT / "build" / "images"
ARCHIVES: Final = {"operator": "operator", "metadata": "metadata", "agent": "agent-cpu", "redis": "redis"}
SYSTEM: Final = "kvstrata-system"
TEAMS: Final = ("team-alpha", "team-beta")
SHORT_S: Final = 60.0
LONG_S: Final = 240.0
"""Bounds of waits: two cores run the whole cluster, and other work beside it."""
_POLL_S: Final = 0.5
_SHOWN_BYTES: Final = 9000
_EVENTS: Final = 8
"""Last lines of a description that are captured: its newest Events."""


class Fleet:
    """Commands of an administrator and of two teams."""

    def __init__(self, cluster: Cluster, transcript: Path, folder: Path) -> None:
        """Write to `transcript`; `folder` is for files that commands read."""
        self.cluster = cluster
        self._transcript = transcript
        self.folder = folder
        self._values = folder / "values.json"
        self._began_s = time.monotonic()

    def say(self, text: str) -> None:
        """Add a line to the transcript."""
        with self._transcript.open("a") as file:
            file.write(f"[{time.monotonic() - self._began_s:6.1f} s] {text}\n")

    def kubectl(self, *arguments: str, stdin: str | None = None, is_shown: bool = True) -> str:
        """Run kubectl as the administrator."""
        answer = self.cluster.plane.kubectl(*arguments, stdin=stdin)
        if is_shown:
            self.say(f"$ kubectl {' '.join(arguments)}\n{answer[:_SHOWN_BYTES].rstrip()}")
        return answer

    def get(self, *arguments: str) -> Any:
        """Read objects, untold."""
        return json.loads(self.kubectl("get", *arguments, "-o", "json", is_shown=False))

    def helm(self, *arguments: str) -> str:
        """Run helm as the administrator."""
        command = [str(find_tool("helm")), *arguments, "--kubeconfig", str(self.cluster.plane.kubeconfig)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=LONG_S, check=False)
        self.say(f"$ helm {' '.join(arguments)}\n{done.stdout[:1200].rstrip()}")
        assert done.returncode == 0, done.stderr
        return done.stdout

    def image(self, part: str) -> Json:
        """Repository, tag and digest of what was built for a part of the chart."""
        ((name, digest),) = image_names(IMAGES / f"{ARCHIVES[part]}.tar").items()
        repository, _, tag = name.removeprefix("docker.io/").rpartition(":")
        return {"repository": repository, "tag": tag, "digest": digest}

    def install(self, huge_pages: str) -> None:
        """Install the chart with images of this tree, and what the quickstart says of tenants."""
        images = {part: self.image(part) for part in ARCHIVES}
        self._values.write_text(json.dumps(manifests.values(images, huge_pages)))
        self.helm("install", "kvstrata", str(ROOT / "charts/kvstrata"), *self._chosen(), "--create-namespace")

    def upgrade(self, *settings: str) -> None:
        """Upgrade the release with settings more."""
        self.helm("upgrade", "kvstrata", str(ROOT / "charts/kvstrata"), *self._chosen(), *settings)

    def engine(self, namespace: str, name: str, node: str, *arguments: str) -> None:
        """Start an engine's pod and wait until it runs."""
        image = self.image("agent")
        body = manifests.engine(namespace, name, node, f"{image['repository']}:{image['tag']}", *arguments)
        self.kubectl("apply", "-f", "-", stdin=manifests.text(manifests.script(namespace), body))
        self.kubectl("wait", "-n", namespace, f"pod/{name}", "--for=condition=Ready", "--timeout=120s")

    def ask(self, namespace: str, name: str, *arguments: str) -> Json:
        """Have an engine's pod store or load, once."""
        program = ("python3.11", "/engine/engine.py", *arguments)
        told: Json = json.loads(self.kubectl("exec", "-n", namespace, name, "--", *program))
        return told

    def rounds(self, namespace: str, name: str) -> list[Json]:
        """What an engine under load has told so far."""
        lines = self.kubectl("logs", "-n", namespace, name, is_shown=False).splitlines()
        return [json.loads(line) for line in lines if line.endswith("}")]

    def condition(self, kind: str) -> Json:
        """A condition of the pool."""
        conditions = self.get("kvpool", manifests.POOL)["status"]["conditions"]
        return next((c for c in conditions if c["type"] == kind), {})

    def agents(self) -> dict[str, Json]:
        """Pods of agents by node."""
        pods = self.get("pods", "-n", SYSTEM, "-l", "app.kubernetes.io/component=agent")["items"]
        return {pod["spec"]["nodeName"]: pod for pod in pods if "deletionTimestamp" not in pod["metadata"]}

    def tier(self, node: str, name: str) -> Json:
        """What a node's agent tells of a tier."""
        tiers = self.get("kvpoolnode", f"{manifests.POOL}.{node}")["status"]["tiers"]
        return next(tier for tier in tiers if tier["name"] == name)

    def until(self, what: str, fact: Callable[[], bool], timeout_s: float = LONG_S) -> None:
        """Wait until something is true, and say how long that took."""
        began_s = time.monotonic()
        while not fact():
            assert time.monotonic() - began_s < timeout_s, f"not within {timeout_s} s: {what}"
            time.sleep(_POLL_S)
        self.say(f"# {what}: after {time.monotonic() - began_s:.1f} s")

    def show(self) -> None:
        """Put what an administrator would look at into the transcript."""
        self.kubectl("get", "nodes,kvpool,kvpoolnode")
        self.kubectl("get", "pods", "-A", "-o", "wide")

    def capture(self, name: str) -> None:
        """Keep, beside the transcript, what kubectl prints now of the pool, for `drawing.draw_terminal`."""
        asked = ("get nodes", "get kvpools,kvpoolnodes,kvoperations", f"get pods -n {SYSTEM}", "get pods -n team-alpha")
        printed = [f"$ kubectl {words}\n{self.kubectl(*words.split(), is_shown=False)}" for words in asked]
        told = self.kubectl("describe", "kvpool", manifests.POOL, is_shown=False)
        events = told[told.index("\nEvents:") + 1 :].rstrip().splitlines()
        last = [f"$ kubectl describe kvpool {manifests.POOL} | tail -n {_EVENTS}", *events[-_EVENTS:]]
        folder = self._transcript.with_suffix("")
        folder.mkdir(exist_ok=True)
        (folder / f"{name}.txt").write_text("\n".join([*printed, *last]) + "\n")

    def _chosen(self) -> tuple[str, ...]:
        # Agents need directories of the host, so the namespace cannot enforce `restricted`; the chart's policies do.
        return ("-n", SYSTEM, "-f", str(self._values), "--set", "podSecurity.enforce=privileged")


def is_ready(pod: Json) -> bool:
    """Whether a pod is Ready."""
    return any(c["type"] == "Ready" and c["status"] == "True" for c in pod["status"].get("conditions", ()))
