"""What is in `inside/` and `pooled/` runs in guests; on this machine nobody collects it."""

collect_ignore = ["inside", "pooled"]
