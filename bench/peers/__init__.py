"""One process for each way to store blocks: peers, limits and ours, all driven by the same few verbs (`loop`)."""
