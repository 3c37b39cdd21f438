"""The operator: observes pools, tenants and nodes, decides, and applies."""
