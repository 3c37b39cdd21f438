"""The page of `kvstrata ui`: the generated dashboards, a map of the fleet and its prefixes, read-only."""
