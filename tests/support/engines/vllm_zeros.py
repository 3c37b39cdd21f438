"""A connector that is wrong: it loads zeros. A test of equal tokens that passes with it shows nothing."""

from typing import Any

import torch

from kvstrata_client.connectors.vllm.connector import KvstrataConnector as Right
from kvstrata_client.connectors.vllm.worker import Pages


class _ZeroPages(Pages):
    def _bring(self, part: Any, there: list[Any]) -> None:
        there.append(torch.zeros_like(part))


class KvstrataConnector(Right):
    """Ours, but for what it puts into pages."""

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Bind the pages, then replace what fills them."""
        super().register_kv_caches(kv_caches)
        assert self._worker is not None
        self._worker._pages.__class__ = _ZeroPages
