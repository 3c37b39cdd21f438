"""What lossy packing of a KV cache does to a small language model that is trained here: `python -m quality --help`."""
