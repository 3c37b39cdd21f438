"""What engines, periodic duties and peers ask of the blocks of this node."""
