"""Life cycle: launch a cluster, look at it, restart parts of it, take it down. Knows nothing of click or rich."""
