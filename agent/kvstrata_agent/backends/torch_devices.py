"""What torch sees. Imports torch, so import this module only where torch is known to be installed."""

import torch


def cuda_devices() -> list[tuple[int, str, int]]:
    """Index, name and bytes of memory of each CUDA device."""
    if not torch.cuda.is_available():
        return []
    found = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return [(i, p.name, p.total_memory) for i, p in enumerate(found)]
