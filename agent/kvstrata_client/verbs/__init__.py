"""The agent's verbs as values: calls, answers, leases."""
