"""What a prompt's blocks are, and how they are loaded and stored."""
