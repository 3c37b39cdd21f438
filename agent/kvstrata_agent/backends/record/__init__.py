"""The bytes of one stored record."""
