"""Tenants, trust domains and shares: identities, keys, erasure, usage."""
