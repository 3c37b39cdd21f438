"""Type of pytest's fixture `record_property`, under the name that tests here use."""

from collections.abc import Callable

Record = Callable[[str, object], None]
