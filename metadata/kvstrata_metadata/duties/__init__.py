"""What the leading replica does: sweep, erase, nominate; what it observes and when it may decide."""
