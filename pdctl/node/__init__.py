"""Scripts that run on a node. They are shipped as text and never imported here."""
