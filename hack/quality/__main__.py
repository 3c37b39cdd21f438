"""What lossy packing of a KV cache costs in quality, on a small model that is trained here: `python hack/quality`.

Trains once (minutes on one core; weights are kept in .quality/), then measures every codec by perplexity of held-out
text, attention outputs by layer and head, and ratio. The last line is one JSON object.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # `bench` is found beside `hack`, wherever this is called from.

from quality import corpus, evaluation, report  # noqa: E402
from quality.codecs import CODECS  # noqa: E402
from quality.model import Shape  # noqa: E402
from quality.training import Plan, trained, weights_digest  # noqa: E402

PAGE: Final = ROOT / "docs" / "quality.md"
KEPT: Final = ROOT / ".quality"

FULL: Final = (Shape(), Plan(steps=400), 128)
QUICK: Final = (Shape(width=64, layers=2, heads=2, kv_heads=1), Plan(steps=40), 64)
"""Whether it works; a model that has learnt little says little."""

_STARTED_S: Final = time.monotonic()


def say(told: str) -> None:
    """Tell how far we are."""
    print(f"[quality {time.monotonic() - _STARTED_S:5.1f} s] {told}", file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, measure, print the page and the last line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a smaller model, hardly trained: does it work at all?")
    parser.add_argument("--write", action="store_true", help="write docs/quality.md")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the last line to PATH as well")
    chosen = parser.parse_args(arguments)
    if chosen.quick and chosen.write:
        parser.error("--write: a page of --quick would mislead")
    shape, plan, windows = QUICK if chosen.quick else FULL
    text = corpus.load()
    model = trained(shape, plan, text, KEPT, say)
    say(f"measuring {len(CODECS)} codecs on {windows} windows")
    measured = evaluation.evaluate(model, text, CODECS, windows, plan.seed)
    parameters = sum(p.numel() for p in model.parameters())
    command = "python hack/quality" + (" --quick" if chosen.quick else "")
    facts = report.Facts(command, shape, plan, text, windows, parameters, weights_digest(model))
    page, line = report.page(facts, measured), report.line(facts, measured)
    if chosen.write:
        PAGE.write_text(page)
    if chosen.json is not None:
        chosen.json.write_text(line + "\n")
    print(page)
    print(line)


if __name__ == "__main__":
    main()
