"""LMCache's own benchmark of L2 adapters, unmodified, run again and again in one process of its environment.

Verbs as lines of JSON on stdin: `bench` runs `lmcache bench l2` on an adapter, `memcpy` copies as much within memory.
Starting Python for every run would cost more than what is measured.
"""

import contextlib
import importlib.metadata
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from lmcache.cli.main import main as lmcache_main


def bench(adapter: dict[str, Any], arguments: Sequence[str]) -> dict[str, Any]:
    """Run the tool, verification included; returns its exit status and what it reported."""
    with tempfile.TemporaryDirectory(prefix="kvstrata-l2-") as directory:
        output = Path(directory) / "result.json"
        command = ["bench", "l2", "--l2-adapter", json.dumps(adapter), "--no-skip-verify", *arguments]
        try:
            lmcache_main([*command, "--format", "json", "--output", str(output)])
        except SystemExit as e:
            return {"status": int(e.code or 0), "report": json.loads(output.read_text()) if output.exists() else None}
        return {"status": 0, "report": json.loads(output.read_text())}


def memcpy(size_bytes: int) -> dict[str, float]:
    """Bytes per second of one thread's copy of warm memory."""
    source = np.ones(size_bytes, np.uint8)
    sink = np.zeros_like(source)
    started_s = time.perf_counter()
    np.copyto(sink, source)
    return {"bytes_per_s": size_bytes / (time.perf_counter() - started_s)}


def main() -> None:
    """Answer verbs until stdin ends; the tool's own words go to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    with contextlib.redirect_stdout(sys.stderr):
        print(json.dumps({"versions": {"lmcache": importlib.metadata.version("lmcache")}}), file=answers, flush=True)
        for line in sys.stdin:
            asked = json.loads(line)
            answer = bench(**asked) if asked.pop("verb") == "bench" else memcpy(**asked)
            print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
