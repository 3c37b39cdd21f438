"""Loads kopf without the Kubernetes library.

kopf loads that library only to recognise objects of two of its classes, which it is never given here (kopf 1.45,
`thirdparty`). While kopf is loaded the library looks absent, which kopf allows for: that saves 30 MB and 2 s of start.
"""

import sys
from typing import Final

_LIBRARY: Final = "kubernetes"

if "kopf" in sys.modules or _LIBRARY in sys.modules:
    import kopf
else:
    sys.modules[_LIBRARY] = None  # type: ignore[assignment]  # What imports take for "absent".
    try:
        import kopf
    finally:
        del sys.modules[_LIBRARY]

__all__ = ["kopf"]
