"""Carries decided actions out, in order, in time and again when they fail."""
