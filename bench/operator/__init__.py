"""The operator at thousands of nodes."""
