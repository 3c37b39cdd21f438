"""The device that tests of connectors compute on: the processor, or what `make test-gpu` names in the environment."""

import os
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the connectors need torch")

DEVICE: Any = torch.device(os.environ.get("KVSTRATA_TEST_DEVICE", "cpu"))
if DEVICE.type == "cuda" and not torch.cuda.is_available():
    pytest.skip("torch sees no CUDA device", allow_module_level=True)
