"""The process of one host that has a pooled tier: a command a line, an answer a line."""

import asyncio
import json
import sys
from typing import Any

from kvstrata_agent.backends.base import SlotRef
from kvstrata_agent.backends.device.pooled import PooledTier, open_pooled
from kvstrata_api.errors import KvStrataError
from kvstrata_api.models.pool import CxlPooled
from support.backends.contract import content, get, put, record

DEVICE = "/dev/dax0.0"


async def carry_out(tier: PooledTier, command: dict[str, Any]) -> dict[str, Any]:
    """Do what is asked for. Errors of the product are answers."""
    match command["do"]:
        case "put":
            stored = [await put(tier, number) for number in command["numbers"]]
            return {"blocks": [[tier.file_of(s), s.extent, s.offset, s.size_bytes, s.stamp] for s, _ in stored]}
        case "get":
            right = 0
            for number, (_, extent, offset, size_bytes, stamp) in command["blocks"]:
                slot = SlotRef(extent, offset, size_bytes, stamp)
                right += await get(tier, slot, record(number, content(number), slot)) == content(number)
            return {"right": right}
        case "read":
            right, refused = 0, []
            for number, (place, extent, offset, size_bytes, stamp) in command["blocks"]:
                slot = SlotRef(extent, offset, size_bytes, stamp)
                made = record(number, content(number), slot)
                into = memoryview(bytearray(made.stored_bytes))
                try:
                    await tier.read_other(command["node"], place, slot, made, into)
                except KvStrataError as e:
                    refused.append(str(e))
                    continue
                assert into == content(number), "wrong bytes were served"
                right += 1
            return {"right": right, "refused": refused}
        case "resize":
            try:
                await tier.resize(command["size_bytes"])
            except KvStrataError as e:
                return {"refused": str(e)}
            return {"held": len(tier.memory.claims.held)}
    raise ValueError(command)


def answer(value: dict[str, Any]) -> None:
    """One line."""
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


async def main() -> None:
    """Open, and serve standard input."""
    node, size_bytes = sys.argv[1], int(sys.argv[2])
    try:
        tier = await asyncio.to_thread(open_pooled, CxlPooled(path=DEVICE), "pool", node, size_bytes)
    except KvStrataError as e:
        answer({"refused": str(e)})
        return
    can, held = tier.capabilities, sorted(tier.memory.claims.held)
    answer({"medium": can.medium, "is_emulated": can.is_emulated, "slices": held})
    while line := await asyncio.to_thread(sys.stdin.readline):
        answer(await carry_out(tier, json.loads(line)))
    await tier.close()


asyncio.run(main())
