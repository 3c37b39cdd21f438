"""Carries decided actions out."""
