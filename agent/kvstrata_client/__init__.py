"""What engine pods install: a client of the local agent that never blocks or crashes its caller."""
