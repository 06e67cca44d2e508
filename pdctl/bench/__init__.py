"""Load on the user's own cluster, honest comparisons of transfer modes, and where the time goes."""
