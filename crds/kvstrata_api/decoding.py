"""What decoders raise. Not in `kvstrata_api.errors`, which commands import before they know that they need msgspec."""

from typing import Final

import msgspec

UNDECODABLE: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What msgspec (0.22) raises: bad UTF-8 is no `DecodeError` to it, and neither is what is nested too deeply."""
