"""Subcommands of `kvstrata`."""
