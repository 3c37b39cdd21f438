"""What kernels read and fill: contiguous memory, of which they see the bytes."""

from mmap import mmap
from typing import Any, TypeAlias

import numpy.typing as npt

Buffer: TypeAlias = bytes | bytearray | memoryview | mmap | npt.NDArray[Any]
