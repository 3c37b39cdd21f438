"""Node preparation: the little that only root can do on a node, and what the machine has. Nothing of the data path."""
