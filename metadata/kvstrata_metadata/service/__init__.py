"""The process: command line, wiring, the round of duties, metrics and the fleet view."""
