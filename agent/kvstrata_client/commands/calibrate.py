"""Command that finds the forms in which a pool should store captured KV: calibrate."""

import argparse
import sys
from collections import Counter
from pathlib import Path
from typing import Any, Final

from kvstrata_api.blocks import Layout
from kvstrata_api.errors import InvalidInputError
from kvstrata_client.calibration import Calibration, Words, calibrate, load, read, save
from kvstrata_client.commands import output
from kvstrata_client.commands.output import table
from kvstrata_native.forms import Rung

_PERMILLE_MAX: Final = 500
_SIDES: Final = ("K", "V")


def options(found: argparse.ArgumentParser) -> None:
    """Options of the command."""
    found.epilog = "example: kvstrata calibrate kv.safetensors --model M --revision R --error-permille 20"
    found.description = (
        "Captured KV is an array (blocks, layers, 2, heads, tokens, dim), K before V, one rank's heads: "
        ".npy with bf16 as 16-bit integers, or floats; .safetensors with BF16. Leave out the first block of every "
        "prompt: pools store it exactly. A .json that this command wrote is verified and printed again."
    )
    found.add_argument("file", type=Path, help="captured KV (.npy, .safetensors), or a calibration (.json)")
    found.add_argument("--error-permille", type=int, default=20, help="permitted error of the pool (default 20)")
    found.add_argument("--model", help="as the pool's compatibility names it")
    found.add_argument("--revision", help="as the pool's compatibility names it")
    found.add_argument("--tensor", default="", help="name in a .safetensors of several tensors")
    found.add_argument("--tp-rank", type=int, default=0, help="rank whose heads these are")
    found.add_argument("--tp-size", type=int, default=1, help="ranks of the engine")
    for name in ("rope-theta", "rope-scaling", "quantization", "adapter"):
        found.add_argument(f"--{name}", default="", help="as the engine's connector puts it into the layout")
    found.add_argument("--out", type=Path, metavar="FILE", help="write the calibration here")
    output.add_option(found, default="yaml")
    found.set_defaults(run=_calibrate)


def _calibrate(given: argparse.Namespace) -> int:
    """Print what was found, and what to put into the pool."""
    found = load(given.file) if given.file.suffix == ".json" else _measured(given)
    if given.out:
        save(found, given.out)
    entry = found.for_pool.model_dump(by_alias=True)
    policy: dict[str, Any] = {
        "mode": "Auto", "maxRelativeErrorPermille": found.permille, "calibration": [entry],
    }  # fmt: skip
    if given.output == "yaml":
        sys.stdout.write("".join(f"# {line}\n" for line in _summary(found)))
    output.show(given.output, {"spec": {"policy": {"compression": policy}}})
    return 0


def _measured(given: argparse.Namespace) -> Calibration:
    if not given.model or not given.revision:
        raise InvalidInputError("--model and --revision are missing: a calibration is of one layout")
    if not 1 <= given.error_permille <= _PERMILLE_MAX:
        raise InvalidInputError(f"--error-permille {given.error_permille}: 1 to {_PERMILLE_MAX} wanted")
    captured = read(given.file, given.tensor)
    return calibrate(captured, _layout(given, captured), given.error_permille)


def _layout(given: argparse.Namespace, captured: Words) -> Layout:
    _, layers, _, heads, tokens, dim = captured.shape
    return Layout(
        given.model, given.revision, "bf16", tokens, layers, heads, dim, 2,
        tp_rank=given.tp_rank, tp_size=given.tp_size, rope_theta=given.rope_theta, rope_scaling=given.rope_scaling,
        quantization=given.quantization, adapter=given.adapter,
    )  # fmt: skip


def _summary(found: Calibration) -> list[str]:
    """Lines for people: how many planes of K and of V take which form."""
    heads = found.layout.kv_heads
    counts = Counter((_SIDES[n // heads % 2], Rung(rung).name.lower()) for n, rung in enumerate(found.rungs))
    rows = [(side, form, str(count)) for (side, form), count in sorted(counts.items())]
    exact = sum(rung == Rung.EXACT for rung in found.rungs)
    head = f"{found.blocks} blocks of layout {found.layout_id}: {found.ratio:.3f} raw bytes per stored byte"
    return [
        f"{head} within {found.permille} permille; {exact} of {len(found.rungs)} planes stay exact",
        *table(("side", "form", "planes"), rows),
    ]
