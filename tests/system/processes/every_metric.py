"""A process that has a sample of every metric of the catalogue, for every combination of a few label values.

`python every_metric.py READY_FILE`; ends on SIGTERM. What the dashboard's queries return from it shows that they ask
for what the instruments export: names, suffixes, labels.
"""

import asyncio
import random
import signal
import sys
from itertools import product
from pathlib import Path

from prometheus_client import CollectorRegistry

from kvstrata_telemetry import ready
from kvstrata_telemetry.catalog import BY_NAME
from kvstrata_telemetry.http import serve
from kvstrata_telemetry.metrics import Instruments, Kind, Metric

VALUES = {
    "pool": ["llama"],
    "node": ["node-1", "node-2"],
    "tier": ["dram", "nvme"],
    "tenant": ["team-a", "team-b"],
    "result": ["hit", "miss", "ok", "refused"],
    "source": ["dram", "nvme"],
    "target": ["dram", "nvme"],
    "stage": ["held", "captured", "delivered"],
    "verb": ["lookup", "acquire"],
}
STEP_S = 0.05


def grow(instruments: Instruments, metric: Metric) -> None:
    """One more event, or another level, under every combination of labels."""
    names = metric.labels
    for values in product(*(VALUES.get(name, ["x"]) for name in names)):
        labels = dict(zip(names, values, strict=True))
        if metric.kind is Kind.COUNTER:
            instruments.counter(metric.name, **labels).inc(random.randint(1, 9))
        elif metric.kind is Kind.GAUGE:
            instruments.gauge(metric.name, **labels).set(1)
        else:
            instruments.histogram(metric.name, **labels).observe(random.choice(metric.buckets))


async def main(ready_file: Path) -> None:
    instruments = Instruments(BY_NAME.values(), CollectorRegistry())
    endpoint = await serve("127.0.0.1", 0, instruments.registry, lambda: True, lambda: True)
    ready.write(ready_file, {"metrics": endpoint.address})
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    while not stop.is_set():
        for metric in BY_NAME.values():
            grow(instruments, metric)
        await asyncio.sleep(STEP_S)
    await endpoint.close()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
