"""What the cluster reports, kept as records."""
