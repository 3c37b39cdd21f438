"""Start and stop of the operator, and the loop that observes, decides and applies."""
