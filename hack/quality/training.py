"""Trains the model, seeded; keeps weights by everything that they depend on, so that a second run finds them."""

import hashlib
import time
from collections.abc import Callable
from dataclasses import astuple, dataclass
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional

from quality.corpus import Corpus
from quality.model import Model, Shape


@dataclass(frozen=True, slots=True)
class Plan:
    """How to train."""

    steps: int
    batch: int = 8
    rate: float = 1e-3
    warmup_steps: int = 50
    seed: int = 1
    threads: int = 1
    """Threads of torch: sums depend on how they are split, so weights do as well."""


def trained(shape: Shape, plan: Plan, corpus: Corpus, kept: Path, say: Callable[[str], None]) -> Model:
    """Return the model, from `kept` where it is there already."""
    torch.set_num_threads(plan.threads)
    torch.manual_seed(plan.seed)
    model = Model(shape)
    path = kept / f"{_identity(shape, plan, corpus)}.pt"
    if path.exists():
        model.load_state_dict(torch.load(path, weights_only=True))
        return model
    _train(model, plan, corpus, say)
    kept.mkdir(parents=True, exist_ok=True)
    torch.save(model.state_dict(), path)
    return model


def weights_digest(model: Model) -> str:
    """SHA-256 of all parameters."""
    digest = hashlib.sha256()
    for name, values in sorted(model.state_dict().items()):
        digest.update(name.encode() + values.numpy().tobytes())
    return digest.hexdigest()


def _identity(shape: Shape, plan: Plan, corpus: Corpus) -> str:
    told = f"{astuple(shape)} {astuple(plan)} {corpus.digest} {torch.__version__}"
    return hashlib.sha256(told.encode()).hexdigest()[:16]


def _train(model: Model, plan: Plan, corpus: Corpus, say: Callable[[str], None]) -> None:
    numbers = np.random.default_rng(plan.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=plan.rate, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _rate(step, plan))
    length, started_s = model.shape.context, time.monotonic()
    for step in range(plan.steps):
        starts = numbers.integers(0, len(corpus.training) - length - 1, plan.batch)
        window = torch.from_numpy(np.stack([corpus.training[s : s + length + 1] for s in starts]))
        logits, _ = model(window[:, :-1])
        loss = functional.cross_entropy(logits.flatten(0, 1), window[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 25 == 0 or step == plan.steps - 1:
            say(f"step {step} of {plan.steps}: loss {loss.item():.3f}, {time.monotonic() - started_s:.0f} s")


def _rate(step: int, plan: Plan) -> float:
    """Share of the full rate: up at the start, down along a cosine."""
    if step < plan.warmup_steps:
        return (step + 1) / plan.warmup_steps
    share = (step - plan.warmup_steps) / max(1, plan.steps - plan.warmup_steps)
    return 0.05 + 0.95 * 0.5 * (1 + float(np.cos(np.pi * share)))
