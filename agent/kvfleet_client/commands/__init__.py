"""Subcommands of `kvfleet`."""
