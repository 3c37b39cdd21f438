"""Command line of node preparation as one value. Pure."""

import argparse
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvstrata_api import __version__, arguments
from kvstrata_api.units import PAGE_BYTES

PAGES_MAX: Final = 1 << 20
DAY_S: Final = 86_400.0


@dataclass(frozen=True, slots=True)
class Config:
    """What node preparation was started with."""

    node: str
    state_dir: Path
    root: Path
    reserves: bool
    others: Mapping[int, int]
    """Pages on each NUMA node that are kept free for pods of others, by page size in bytes."""
    take_back_s: float
    """For so long nobody must have wanted pages before they are taken back."""
    dax_devices: tuple[str, ...]
    """Names, with `*` and `?`, of dax devices whose driver may be changed; none may where it is empty."""
    gives_dax_back: bool
    kubeconfig: Path | None
    ready_file: Path | None
    log_level: str


def parse(argv: list[str] | None = None) -> Config:
    """Read the command line; leaves the process with a message and status 2 when it is wrong."""
    given = _parser().parse_args(argv)
    return Config(
        node=given.node,
        state_dir=given.state_dir,
        root=given.root,
        reserves=given.huge_pages == "Reserve",
        others=dict(given.keep_free),
        take_back_s=given.take_back_s,
        dax_devices=tuple(given.dax_device),
        gives_dax_back=given.dax_give_back,
        kubeconfig=given.kubeconfig,
        ready_file=given.ready_file,
        log_level=given.log_level,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kvstrata-node",
        description="Reserves huge pages and sets modes of dax devices for the pools of one node, and reports what the "
        "machine has. Run it as root.",
    )
    add = parser.add_argument
    add("--version", action="version", version=__version__)
    name = os.environ.get("NODE_NAME")
    add("--node", default=name, required=not name, help="name of the Node; default: $NODE_NAME")
    add("--state-dir", type=Path, required=True, help="remembers what was changed; survives a restart")
    add("--root", type=Path, default=Path("/"), help="where proc and sys of the host are mounted; default: %(default)s")
    add(
        "--huge-pages",
        choices=("Reserve", "Report"),
        default="Reserve",
        help="Report changes nothing on the machine; default: %(default)s",
    )
    add(
        "--keep-free",
        type=_pages,
        action="append",
        default=[],
        metavar="SIZE=PAGES",
        help="huge pages on each NUMA node that pods of others use, such as 2Mi=512, beside those of tiers",
    )
    add(
        "--take-back-s",
        type=arguments.seconds(0, DAY_S),
        default=60.0,
        help="what was added or changed goes back when no pool has wanted it for so long; default: %(default)s",
    )
    add(
        "--dax-device",
        type=_device,
        action="append",
        default=[],
        metavar="NAME",
        help="dax device that may be brought into the mode that CXL tiers declare, such as dax0.0 or dax0.*; "
        "default: none is changed",
    )
    add(
        "--dax-give-back",
        action="store_true",
        help="dax devices get their former driver back when no tier wants them in the declared mode",
    )
    add("--kubeconfig", type=Path, help="default: $KUBECONFIG, the pod's own, ~/.kube/config")
    add("--ready-file", type=Path, help="written once the first report of the machine was written")
    add("--log-level", default="info", choices=("debug", "info", "warning", "error"))
    return parser


def _pages(text: str) -> tuple[int, int]:
    size, _, count = text.partition("=")
    if size not in {"2Mi", "1Gi"} or not count.isascii() or not count.isdigit() or int(count) > PAGES_MAX:
        raise argparse.ArgumentTypeError(f"{text!r}: 2Mi=PAGES or 1Gi=PAGES wanted, at most {PAGES_MAX}")
    return PAGE_BYTES[size], int(count)


def _device(text: str) -> str:
    if re.fullmatch(r"dax[0-9.*?]{1,16}", text) is None:
        raise argparse.ArgumentTypeError(f"{text!r}: name of a dax device wanted, such as dax0.0, dax0.* or dax*")
    return text
