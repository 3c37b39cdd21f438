"""Media that are files: NVMe and shared flash."""
