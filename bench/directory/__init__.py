"""The directory in Redis against bare Redis."""
