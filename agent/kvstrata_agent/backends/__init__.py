"""One small class for each medium, behind one contract."""
