"""An agent's side of the directory: what it announces, and what it remembers of what it looked up."""
