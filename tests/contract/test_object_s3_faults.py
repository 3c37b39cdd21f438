"""An S3 server that refuses, breaks off, and keeps parts of uploads: a real gateway behind a proxy that does so."""

import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from controlplane.s3_gateway import s3_gateway
from kvstrata_agent.backends.base import MediumAwayError
from kvstrata_agent.backends.object.client import PART_BYTES, WHOLE_BYTES_MAX, ObjectClient
from kvstrata_agent.backends.object.object_tier import ObjectStoreTier, open_object_tier
from kvstrata_agent.backends.object.pacing import ATTEMPTS_MAX, REQUESTS_MAX, TOKENS_MAX
from kvstrata_agent.backends.registry import Place, make_backend, wipe
from kvstrata_api.errors import BackendFailedError
from kvstrata_api.models.poolnode import NodeTier
from kvstrata_node.discovery import NodeFacts
from support.backends.contract import CAPACITY_BYTES, content, get, put
from support.backends.s3_faults import Fault, FaultyS3, Request, faulty_s3

pytestmark = [pytest.mark.contract, pytest.mark.timeout(1200)]  # The gateway is built once, for minutes.

LARGE = os.urandom(1 << 20) * (WHOLE_BYTES_MAX // (1 << 20) + 9)


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    with s3_gateway(tmp_path_factory.mktemp("s3"), "kvstrata") as settings:
        yield settings


@pytest.fixture
def s3(gateway: dict[str, str]) -> Iterator[FaultyS3]:
    with faulty_s3(gateway) as proxy:
        yield proxy


@pytest.fixture
def url(request: pytest.FixtureRequest) -> str:
    return f"s3://kvstrata/{abs(hash(request.node.nodeid)):x}"


@pytest.fixture
async def client(s3: FaultyS3, url: str) -> AsyncIterator[ObjectClient]:
    client = ObjectClient(url, s3.settings)
    yield client
    await client.close()


@pytest.fixture
async def tier(client: ObjectClient, s3: FaultyS3) -> AsyncIterator[ObjectStoreTier]:
    tier = await open_object_tier(client, "pool-a", "node-a", CAPACITY_BYTES)
    s3.requests.clear()
    yield tier
    s3.decide = lambda _: None
    await tier.close()


async def test_a_block_takes_one_request_each_way(tier: ObjectStoreTier, s3: FaultyS3) -> None:
    stored = await put(tier, 1, size_bytes=1 << 20)
    assert await get(tier, *stored) == content(1, 1 << 20)

    assert [r.method for r in s3.requests] == ["PUT", "GET"]
    assert s3.requests[1].range == f"bytes=4096-{4096 + (1 << 20) - 1}"


async def test_large_objects_go_up_in_parts_and_come_back_in_ranges(client: ObjectClient, s3: FaultyS3) -> None:
    await client.put("large", [LARGE])

    assert len(s3.of("PUT", "partNumber=")) == -(-len(LARGE) // PART_BYTES)
    assert max(r.size_bytes for r in s3.of("PUT")) <= PART_BYTES + 4096
    assert bytes(await client.get("large", 0, len(LARGE))) == LARGE
    assert len({r.range for r in s3.of("GET")}) == -(-len(LARGE) // PART_BYTES)
    assert bytes(await client.get("large", 100, 5_000_000)) == LARGE[100:5_000_000]


@pytest.mark.parametrize("fault", [429, 503, 500, "cut"])
async def test_what_passes_is_tried_again(tier: ObjectStoreTier, s3: FaultyS3, fault: int) -> None:
    seen: dict[str, int] = {}

    def twice(request: Request) -> int | None:
        seen[request.method] = seen.get(request.method, 0) + 1
        return fault if seen[request.method] <= 2 else None

    s3.decide = twice
    stored = await put(tier, 1)
    assert await get(tier, *stored) == content(1)
    assert seen == {"PUT": 3, "GET": 3}


async def test_what_stays_is_given_up_within_a_count_and_a_time(tier: ObjectStoreTier, s3: FaultyS3) -> None:
    stored = await put(tier, 1)
    s3.requests.clear()
    s3.decide = lambda _: 500
    started_s = time.monotonic()

    with pytest.raises(BackendFailedError, match=r"get s3://.*500 Internal Server Error"):
        await get(tier, *stored)

    assert len(s3.requests) == ATTEMPTS_MAX
    assert time.monotonic() - started_s < 60
    pauses = [b.at_s - a.at_s for a, b in zip(s3.requests, s3.requests[1:], strict=False)]
    assert len({round(p, 4) for p in pauses}) == len(pauses), "pauses are spread"


@pytest.mark.parametrize(
    ("fault", "is_away"), [(503, True), (500, True), ("cut", True), (403, True), (404, False), (416, False)]
)
async def test_only_a_store_that_answers_says_that_an_object_has_gone(
    tier: ObjectStoreTier, s3: FaultyS3, fault: Fault, *, is_away: bool
) -> None:
    stored = await put(tier, 1)
    s3.decide = lambda _: fault

    with pytest.raises(BackendFailedError) as failed:
        await get(tier, *stored)
    assert isinstance(failed.value, MediumAwayError) == is_away
    s3.decide = lambda _: None
    assert await get(tier, *stored) == content(1)


async def test_what_no_attempt_can_change_is_asked_once(tier: ObjectStoreTier, s3: FaultyS3) -> None:
    s3.decide = lambda _: 403

    with pytest.raises(BackendFailedError, match="privileges"):
        await put(tier, 1)
    assert len(s3.requests) == 1


async def test_many_callers_of_a_broken_store_share_one_budget_of_retries(client: ObjectClient, s3: FaultyS3) -> None:
    s3.decide = lambda _: 500

    results = await asyncio.gather(*(client.get(f"{n}", 0, 10) for n in range(100)), return_exceptions=True)

    assert all(isinstance(r, BackendFailedError) for r in results)
    assert len(s3.requests) <= 100 + TOKENS_MAX


async def test_a_store_that_refuses_gets_fewer_requests_at_once_and_more_again_later(
    client: ObjectClient, s3: FaultyS3
) -> None:
    await client.put("small", [b"x" * 100])
    s3.delay_s = 0.01
    s3.decide = lambda _: 503 if s3.under_way > 4 else None

    for _ in range(4):
        await asyncio.gather(*(client.get("small", 0, 100) for _ in range(40)), return_exceptions=True)
        await asyncio.sleep(0.4)

    assert client.pace.limit < REQUESTS_MAX / 2
    assert client.pace.refused > 0
    assert client.pace.refusing_s(time.monotonic()) > 1
    s3.decide = lambda _: None
    s3.most_under_way = 0
    low = client.pace.limit
    await asyncio.gather(*(client.get("small", 0, 100) for _ in range(20)))
    assert s3.most_under_way <= low + 4
    for _ in range(8):
        await asyncio.gather(*(client.get("small", 0, 100) for _ in range(60)))
    assert client.pace.limit > low + 4


async def test_a_caller_that_leaves_while_it_waits_for_its_turn_blocks_nobody(
    client: ObjectClient, s3: FaultyS3
) -> None:
    await client.put("small", [b"x" * 100])
    client.pace.limit = 1.0
    s3.delay_s = 0.05
    asked = [asyncio.ensure_future(client.get("small", 0, 100)) for _ in range(6)]
    await asyncio.sleep(0.02)
    for task in asked[1:5]:
        task.cancel()
    await asyncio.wait(asked)

    assert bytes(await asked[5]) == b"x" * 100


def _parts(s3: FaultyS3, client: ObjectClient) -> list[tuple[str, str]]:
    """Unfinished uploads, as the gateway lists them."""
    uploads = client._uploads
    assert uploads is not None
    return uploads._list(uploads.prefix)


async def test_an_upload_that_fails_leaves_no_parts(client: ObjectClient, s3: FaultyS3) -> None:
    s3.decide = lambda r: 403 if "partNumber=2" in r.query else None

    with pytest.raises(BackendFailedError, match="privileges"):
        await client.put("large", [LARGE])

    await client.close()
    assert s3.of("DELETE", "uploadId=")
    assert await asyncio.to_thread(_parts, s3, client) == []


async def test_an_upload_whose_caller_leaves_ends_by_itself(client: ObjectClient, s3: FaultyS3) -> None:
    s3.delay_s = 0.05
    uploading = asyncio.ensure_future(client.put("large", [LARGE]))
    await _parts_come(s3)
    uploading.cancel()
    await asyncio.wait([uploading])
    await client.close()

    assert await asyncio.to_thread(_parts, s3, client) == []


_KILLED = """
import asyncio, sys
from kvstrata_agent.backends.object.client import ObjectClient
settings = dict(zip(*[iter(sys.argv[2:])] * 2))
asyncio.run(ObjectClient(sys.argv[1], settings).put("pool-a/node-a/large", [bytes(64 << 20)]))
"""


async def test_parts_of_a_killed_agent_go_at_its_next_start_and_nobody_elses(
    client: ObjectClient, s3: FaultyS3, url: str, tmp_path: Path
) -> None:
    s3.decide = lambda r: "hang" if "partNumber=" in r.query else None
    told = [word for pair in s3.settings.items() for word in pair]
    child = await asyncio.create_subprocess_exec(sys.executable, "-c", _KILLED, url, *told, cwd=tmp_path)
    try:
        await _parts_come(s3)
    finally:
        child.kill()
        await child.wait()
    s3.decide = lambda _: None
    assert len(await asyncio.to_thread(_parts, s3, client)) == 1

    other = await open_object_tier(ObjectClient(url, s3.settings), "pool-a", "node-b", CAPACITY_BYTES)
    await other.close()
    assert len(await asyncio.to_thread(_parts, s3, client)) == 1
    tier = await open_object_tier(client, "pool-a", "node-a", CAPACITY_BYTES)
    await tier.close()

    assert await asyncio.to_thread(_parts, s3, client) == []


async def _parts_come(s3: FaultyS3) -> None:
    async with asyncio.timeout(20):
        while not s3.of("PUT", "partNumber="):  # noqa: ASYNC110  The proxy's threads have no event for it.
            await asyncio.sleep(0.01)


async def test_a_store_that_cannot_list_uploads_is_no_reason_not_to_start(client: ObjectClient, s3: FaultyS3) -> None:
    s3.decide = lambda r: 501 if "uploads" in r.query else None

    tier = await open_object_tier(client, "pool-a", "node-a", CAPACITY_BYTES)
    await put(tier, 1)
    await tier.close()


async def test_a_store_is_opened_read_and_wiped_with_the_credentials_of_its_secret(
    gateway: dict[str, str], url: str
) -> None:
    wanted = NodeTier.model_validate(
        {"name": "cold", "type": "Object", "capacityBytes": CAPACITY_BYTES,
         "object": {"url": url, "secretRef": {"name": "kv-s3"}}}
    )  # fmt: skip
    secrets = {"kv-s3": {key: f"{value}\n".encode() for key, value in gateway.items()}}

    async def read_secret(name: str) -> dict[str, bytes] | None:
        return secrets.get(name)

    place = Place("pool-a", "node-a", NodeFacts(0, ()), read_secret=read_secret)
    tier = await make_backend(wanted, place)
    stored = await put(tier, 1)
    assert await get(tier, *stored) == content(1)
    await tier.close()
    left = ObjectClient(url, gateway)
    assert [path async for path, _ in left.list("")]

    await wipe(wanted, place)
    assert [path async for path, _ in left.list("")] == []
    await left.close()
    secrets["kv-s3"]["aws_secret_access_key"] = b"another"
    with pytest.raises(BackendFailedError):
        await make_backend(wanted, place)
