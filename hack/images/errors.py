"""Errors of the image builder. Imports nothing."""


class ImageError(Exception):
    """An image could not be made; the message says what and why."""
