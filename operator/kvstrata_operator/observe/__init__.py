"""What the cluster says, kept as records."""
