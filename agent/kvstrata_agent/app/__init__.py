"""Start and stop of the agent: command line, configuration, wiring, periodic duties."""
