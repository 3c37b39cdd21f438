"""Which licences may be installed beside kvstrata, and why. Pure."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

ALLOWED: Final = {
    **dict.fromkeys(
        ["0BSD", "Apache-2.0", "BSD-2-Clause", "BSD-3-Clause", "BSL-1.0", "CC0-1.0", "ISC", "MIT", "MIT-0", "Zlib"],
        "permissive",
    ),
    **dict.fromkeys(["PSF-2.0", "CNRI-Python"], "permissive; the licences of Python itself"),
    "MPL-2.0": "copyleft by file; used unmodified",
}
"""SPDX identifiers, each with the reason."""

EXCEPTIONS: Final = {"LLVM-exception": "gives more rights, takes none"}
"""SPDX exceptions after `WITH`."""

DISTRIBUTIONS: Final = {
    "atheris": "Apache-2.0 by the LICENSE file in its wheel; its metadata name none. For `make fuzz` alone",
    "cuda-toolkit": "empty package that only names nvidia-* packages, which are checked themselves",
}
"""Distributions that state no licence, each with the reason why that is no obstacle."""

PROPRIETARY: Final = re.compile(r"nvidia-[a-z0-9-]+")
"""CUDA's libraries: redistributable with torch under NVIDIA's terms; only in the extra `cuda`, never in our wheel."""

_ALIASES: Final = {
    "3-clause bsd license": "BSD-3-Clause", "apache": "Apache-2.0", "apache 2": "Apache-2.0",
    "apache 2.0": "Apache-2.0", "apache 2.0 license": "Apache-2.0", "apache software license": "Apache-2.0",
    "bsd": "BSD-3-Clause", "bsd 2-clause license": "BSD-2-Clause", "bsd license": "BSD-3-Clause",
    "isc license": "ISC", "isc license (iscl)": "ISC", "mit license": "MIT", "mit style": "MIT",
    "mozilla public license 2.0 (mpl 2.0)": "MPL-2.0", "psfl": "PSF-2.0",
    "python software foundation license": "PSF-2.0", "3-clause bsd": "BSD-3-Clause",
}  # fmt: skip
"""What metadata older than SPDX expressions says."""


@dataclass(frozen=True, slots=True)
class Stated:
    """What a distribution says of its licence; the first that is not empty counts."""

    name: str
    expression: str = ""
    """`License-Expression`, SPDX."""
    field: str = ""
    """`License`, free text."""
    classifiers: tuple[str, ...] = ()
    """Last parts of the `License ::` classifiers."""


def licence(stated: Stated) -> str:
    """SPDX expression of a distribution; empty when it states none."""
    if stated.expression:
        return stated.expression
    texts = [stated.field, *stated.classifiers]
    known = [_ALIASES.get(text.lower(), text) for text in texts if text and text != "UNKNOWN"]
    return next((text for text in known if "\n" not in text and len(text) < 60), "")


def refusal(stated: Stated) -> str:
    """Why the distribution may not be installed; empty when it may."""
    if stated.name in DISTRIBUTIONS or PROPRIETARY.fullmatch(stated.name):
        return ""
    expression = licence(stated)
    if not expression:
        return f"{stated.name} states no licence"
    unknown = [choice for choice in _choices(expression) if not _is_allowed(choice)]
    if len(unknown) < len(list(_choices(expression))):
        return ""
    return f"{stated.name}: {expression} is not on the list"


def _choices(expression: str) -> Iterable[str]:
    """Alternatives of an expression; one that is allowed is enough. Brackets are not read."""
    return (choice.strip() for choice in expression.split(" OR "))


def _is_allowed(choice: str) -> bool:
    """Whether every part of `A AND B WITH C` is on the list."""
    for part in choice.split(" AND "):
        name, _, exception = part.strip().partition(" WITH ")
        if name not in ALLOWED or (exception and exception not in EXCEPTIONS):
            return False
    return True
