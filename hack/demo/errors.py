"""Why a demo ends early."""


class DemoError(Exception):
    """A step could not be carried out; the message says which, why, and what to do."""


class CheckError(Exception):
    """A step was carried out and its result is wrong: kvstrata broke a promise."""
