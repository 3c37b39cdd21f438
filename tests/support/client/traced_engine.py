"""An engine that is traced, in a process of its own: OpenTelemetry takes one provider of a process.

`python -m support.client.traced_engine SOCKET POOL RECEIVER traced|untraced`.
"""

import subprocess
import sys
from pathlib import Path

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

from kvstrata import NO_TOKEN, Client, PrefixCache, Target
from support.agent.standalone import LAYOUT, Up, content, tokens
from support.runner.alone import environment


def run(up: Up, receiver: str, how: str) -> None:
    """Have such an engine store and load, and end."""
    command = [sys.executable, "-m", "support.client.traced_engine", str(up.socket), up.pool, receiver, how]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False, env=environment())
    assert done.returncode == 0, done.stderr[-3000:]


def main(socket: str, pool: str, receiver: str, how: str) -> None:
    """One request: a prefix is stored and loaded, another one is looked up and not there."""
    provider = TracerProvider(resource=Resource.create({"service.name": "engine"}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=receiver)))
    if how == "traced":
        trace.set_tracer_provider(provider)
    with Client.attach(Target(Path(socket), pool, NO_TOKEN, LAYOUT), strict=True, wait_s=60) as client:
        cache = PrefixCache(client)
        with provider.get_tracer("engine").start_as_current_span("request"):
            stored = cache.store(tokens(1), content(1))
            loaded = cache.load(tokens(1), session="s")
            absent = cache.load(tokens(2))
            known = cache.lookup(tokens(1), session="s")
    assert (stored.published, loaded.blocks, absent.blocks, known.blocks) == (12, 12, 0, 12)
    provider.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
