"""What is not on this node: the directory and other agents."""
