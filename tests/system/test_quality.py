"""The measurement of quality itself: exact forms cost nothing, resuming is what it says, and fewer bits are worse."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from quality.model import Model, Shape

pytestmark = pytest.mark.system

ROOT = Path(__file__).parents[2]


def test_reading_on_from_a_cache_is_reading_it_all() -> None:
    torch.manual_seed(3)
    model = Model(Shape(width=32, layers=2, heads=4, kv_heads=2, head_dim=8))
    tokens = torch.randint(0, 128, (2, 40))
    with torch.no_grad():
        whole, _ = model(tokens)
        _, past = model(tokens[:, :25])
        resumed, _ = model(tokens[:, 25:], past)

    torch.testing.assert_close(resumed, whole[:, 25:], atol=1e-5, rtol=1e-5)


def test_the_quick_run_tells_what_is_exact_and_orders_what_is_not() -> None:
    command = (sys.executable, "hack/quality", "--quick")

    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)

    assert done.returncode == 0, done.stderr
    codecs = json.loads(done.stdout.splitlines()[-1])["quality"]["codecs"]
    worst = {name: max(max(map(max, layer)) for layer in c["attention_error"]) for name, c in codecs.items()}
    assert worst["exact"] == worst["lossless"] == 0
    assert codecs["lossless"]["perplexity"] == codecs["exact"]["perplexity"]
    assert codecs["lossless"]["ratio"] > 1.2
    assert worst["control: prefix of zeros"] > worst["int4 K token, V token"]
    for where in ("K channel, V token", "K token, V token"):
        assert 0 < worst[f"int8 {where}"] < worst[f"fp8 {where}"] < worst[f"int4 {where}"] < 0.5
        assert codecs[f"int4 {where}"]["ratio"] > codecs[f"int8 {where}"]["ratio"] > 1.6
