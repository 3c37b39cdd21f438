"""Threats to isolation: each is a module `t<n>` that tries, counts, and proves that it would see a success."""
