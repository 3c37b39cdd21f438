"""Coverage-guided fuzzing of everything that comes from outside: `python -m fuzz` (`make fuzz`)."""
