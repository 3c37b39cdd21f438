"""Gives folders of the host to an agent's user: `python3 -I -m kvstrata_node.folders --owner 65532:65532 PATH=MODE...`.

Runs as root before the agent, with CAP_CHOWN and no other capability, on folders that the kubelet may just have made.
Law: a folder changes its owner only while it is root's and empty; what anybody has put there stays whose it is.
"""

import argparse
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvstrata_api.errors import InvalidInputError

_TOLERATED: Final = frozenset({"lost+found"})
"""What an empty file system may hold: mke2fs makes it."""


@dataclass(frozen=True, slots=True)
class Owner:
    """Numbers of a user and a group."""

    user: int
    group: int


def give(path: Path, mode: int, owner: Owner) -> bool:
    """Give an existing folder to `owner`; true when it was changed, false when it was the owner's already.

    Raises `InvalidInputError` for a folder that is neither the owner's nor empty and root's, `OSError`.
    """
    if path.stat().st_uid == owner.user:
        return False
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        seen = os.fstat(fd)
        with os.scandir(fd) as entries:
            held = sorted({entry.name for entry in entries} - _TOLERATED)
        if seen.st_uid != os.geteuid() or held:
            whose = f"belongs to user {seen.st_uid}" + (f" and holds {held[0]!r}" if held else "")
            raise InvalidInputError(
                f"folder {path} {whose}; it has to be user {owner.user}'s: chown -R {owner.user}:{owner.group} {path}"
            )
        os.fchmod(fd, mode)  # Before the owner, who alone may do so afterwards.
        os.fchown(fd, owner.user, owner.group)
    finally:
        os.close(fd)
    return True


def main(argv: list[str] | None = None) -> int:
    """Give every folder that is named; 1 when one cannot be given, 2 for a wrong command line."""
    given = _parser().parse_args(argv)
    try:
        for path, mode in given.folders:
            if give(path, mode, given.owner):
                print(f"{path} is user {given.owner.user}'s now")  # noqa: T201  The log of the init container.
    except (InvalidInputError, OSError) as e:
        print(e, file=sys.stderr)  # noqa: T201  The kubelet reports it as the reason.
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="kvstrata_node.folders", description="Gives folders to an agent's user.")
    parser.add_argument("--owner", type=_owner, required=True, metavar="UID:GID")
    parser.add_argument(
        "folders", type=_folder, nargs="+", metavar="PATH=MODE", help="such as /var/lib/kvstrata/a=0750"
    )
    return parser


def _owner(text: str) -> Owner:
    user, _, group = text.partition(":")
    if not (user.isascii() and user.isdigit() and group.isascii() and group.isdigit()):
        raise argparse.ArgumentTypeError(f"{text!r}: UID:GID wanted, both numbers")
    return Owner(int(user), int(group))


def _folder(text: str) -> tuple[Path, int]:
    path, _, mode = text.rpartition("=")
    if not path.startswith("/") or len(mode) != 4 or set(mode) - set("01234567"):
        raise argparse.ArgumentTypeError(f"{text!r}: PATH=MODE wanted, an absolute path and four octal digits")
    return Path(path), int(mode, 8)


if __name__ == "__main__":
    sys.exit(main())
