"""Every full count on one commit, in steps that can be stopped and taken up again: `python -m proof`."""
