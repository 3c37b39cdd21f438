"""Other agents: what they lend to this one, and what this one lends to them."""
