"""Short digests of JSON values, for "is this still the same?". Pure."""

import hashlib
import json
from typing import Final

_DIGEST_BYTES: Final = 8
"""64 bits: compared among the few revisions of one object, not a security boundary."""


def digest(value: object) -> str:
    """Name a JSON value by 16 hexadecimal digits; key order and white space do not matter."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=_DIGEST_BYTES).hexdigest()
