"""`kvstrata conformance`: drives a program that uses a client of the protocol, and says what it gets wrong.

`driver` speaks to the program, `stage` has an agent for it, `scenarios` are what is tried. `reference` is such a
program over this package's own client.
"""
