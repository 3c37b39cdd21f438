"""The operator against a lying API server, kills at any call, and people who change their minds."""
