"""Prefill on one node, decode on another: the decoding node has the first layer before the last one is computed."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.agent.handover_nodes import PeerThread, two_nodes
from support.client.attached import attached

torch = pytest.importorskip("torch", reason="the transformers connector needs torch")
pytest.importorskip("transformers", reason="the transformers connector needs transformers")

from transformers import DynamicCache  # noqa: E402

from kvstrata_api.errors import KvStrataError, LeaseLostError  # noqa: E402
from kvstrata_client.cache import PrefixCache  # noqa: E402
from kvstrata_client.connectors.transformers import CacheConnector, layout_of  # noqa: E402
from support.client.tiny_llama import CONFIG, PROMPT, made, run  # noqa: E402
from support.client.torch_device import DEVICE  # noqa: E402

pytestmark = pytest.mark.system

LAYOUT = layout_of(CONFIG, "tiny", "r1", "fp32")
WHOLE_TOKENS = 192
ARRIVE_S = 20.0


@pytest.fixture(scope="module")
def model() -> Any:
    return made()


def connector_of(agent: PeerThread) -> Iterator[CacheConnector]:
    with attached(agent.socket, layout=LAYOUT) as client:
        yield CacheConnector(PrefixCache(client), CONFIG, LAYOUT, DEVICE)


@pytest.fixture
def connectors(tmp_path: Path) -> Iterator[tuple[CacheConnector, CacheConnector]]:
    with two_nodes(tmp_path) as (writer, reader):
        for prefilling in connector_of(writer):
            for decoding in connector_of(reader):
                yield prefilling, decoding


def test_the_first_layer_is_there_before_the_last_is_computed_and_logits_are_the_same(
    model: Any, connectors: tuple[CacheConnector, CacheConnector]
) -> None:
    prefilling, decoding = connectors
    kept = DynamicCache(config=CONFIG)
    run(model, PROMPT[:WHOLE_TOKENS], kept)
    expected = run(model, PROMPT[WHOLE_TOKENS:], kept)

    prefill = prefilling.prefill(PROMPT[:WHOLE_TOKENS])
    restoring = decoding.restore_layerwise(PROMPT, handover=prefill.handover)
    seen: list[bool] = []

    def before_the_last_layer(*_: object) -> None:
        restoring.arrivals.layers[0].result(ARRIVE_S)
        seen.append(restoring.arrivals.layers[-1].done())

    hook = model.model.layers[-1].register_forward_pre_hook(before_the_last_layer)
    run(model, PROMPT[:WHOLE_TOKENS], prefill.cache)
    hook.remove()
    actual = run(model, PROMPT[WHOLE_TOKENS:], restoring.cache)
    restoring.arrivals.finish()

    assert seen == [False]
    assert restoring.tokens == WHOLE_TOKENS
    assert torch.equal(expected.view(torch.int32), actual.view(torch.int32))
    stored = prefill.finish()
    assert (stored.published, stored.existed, stored.refused) == (0, 0, 0)
    assert prefilling.restore(PROMPT).tokens == WHOLE_TOKENS


def test_a_prefill_that_is_given_up_is_a_miss_and_the_prompt_is_computed(
    model: Any, connectors: tuple[CacheConnector, CacheConnector]
) -> None:
    prefilling, decoding = connectors
    prefill = prefilling.prefill(PROMPT[:WHOLE_TOKENS])
    restoring = decoding.restore_layerwise(PROMPT, handover=prefill.handover)
    hook = model.model.layers[1].register_forward_pre_hook(lambda *_: prefill.abandon())
    run(model, PROMPT[:WHOLE_TOKENS], prefill.cache)
    hook.remove()
    with pytest.raises(KvStrataError):
        run(model, PROMPT[WHOLE_TOKENS:], restoring.cache)

    with pytest.raises(LeaseLostError):
        restoring.arrivals.finish()
    assert decoding.restore(PROMPT).tokens == 0
