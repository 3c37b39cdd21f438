"""An embedded Redis: its process, its configuration and its Secret."""
