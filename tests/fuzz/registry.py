"""All targets by name, and which modules of the product each of them tries. A part is imported when it is asked for."""

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from fuzz.target import Target


@dataclass(frozen=True, slots=True)
class Part:
    """Targets of one module here."""

    module: str
    names: tuple[str, ...]
    tries: tuple[str, ...]
    """Modules and packages that are instrumented: inputs that go new ways in them are kept."""


PARTS: Final = (
    Part(
        "frames",
        ("engine-requests", "agent-replies", "peer-questions", "peer-answers"),
        ("kvstrata_api.wire", "kvstrata_api.failures", "kvstrata_agent.fleet.peers.wire", "threats.frames"),
    ),
    Part(
        "verbs",
        ("engine-verbs",),
        ("kvstrata_agent.serve", "kvstrata_agent.cache", "kvstrata_agent.blocks"),
    ),
    Part(
        "manifests",
        ("manifest-texts", "manifest-objects"),
        (
            "kvstrata_api.manifest_text", "kvstrata_api.validate", "kvstrata_api.validate_structure",
            "kvstrata_api.models", "kvstrata_api.rules", "kvstrata_api.units", "yaml",
        ),
    ),
    Part(
        "media",
        (
            "record-headers", "sealed-headers", "index-bodies", "index-maps", "ledgers", "pooled-heads", "store-claims",
            "object-markers", "session-journals", "listings", "safetensors", "blocks-packed", "blocks-mixed",
        ),
        (
            "kvstrata_agent.backends.record", "kvstrata_agent.backends.file.index_format",
            "kvstrata_agent.backends.file.claim", "kvstrata_agent.backends.memory.ledger",
            "kvstrata_agent.backends.device.pooled", "kvstrata_agent.backends.object.object_tier",
            "kvstrata_agent.cache.session_journal", "kvstrata_agent.weights.listing", "kvstrata_agent.codec.exact",
            "kvstrata_agent.codec.lossy",
        ),
    ),
    Part(
        "records",
        ("redis-locations", "redis-records", "redis-replies"),
        ("kvstrata_metadata.store.records", "kvstrata_metadata.store.keys", "kvstrata_metadata.directory.registry"),
    ),
    Part(
        "texts",
        ("kv-events", "kv-hints", "traces", "hardware", "metrics", "captures", "keys"),
        (
            "kvstrata_client.connectors.engine_events", "kvstrata_client.connectors.vllm.hints",
            "kvstrata_agent.replay.traces", "kvstrata_agent.replay.chains", "kvstrata_agent.replay.hardware",
            "kvstrata_api.manifest_text", "kvstrata_api.units", "kvstrata_api.wrapping", "kvstrata_client.calibration",
            "kvstrata_agent.kube.authenticator", "prometheus_client.parser",
        ),
    ),
    Part("kernels", ("kernels",), ("kvstrata_native.python", "kvstrata_native.python_forms")),
)  # fmt: skip
NAMES: Final = tuple(name for part in PARTS for name in part.names)


def part_of(name: str) -> Part:
    """Part that a target is in. Raises `KeyError`."""
    return next(part for part in PARTS if name in part.names)


def target(name: str) -> Target:
    """Import a target's part. Raises `KeyError`."""
    found: tuple[Target, ...] = importlib.import_module(f"fuzz.{part_of(name).module}").TARGETS
    return next(one for one in found if one.name == name)


def write_seeds(name: str, folder: str) -> None:
    """Write what the product's own encoders make, for a session to begin with."""
    for number, seed in enumerate(target(name).seeds()):
        (Path(folder) / f"seed-{number:02}").write_bytes(seed)
