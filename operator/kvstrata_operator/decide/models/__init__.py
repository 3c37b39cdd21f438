"""KVModelCaches: which nodes are to have which weights, and how far they are."""
