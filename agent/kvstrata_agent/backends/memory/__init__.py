"""Media that processes map: host DRAM and CXL."""
