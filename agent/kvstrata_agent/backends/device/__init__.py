"""Media behind a device queue: HBM and devdax."""
