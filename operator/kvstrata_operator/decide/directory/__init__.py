"""The directory's Redis: its size and its workload."""
