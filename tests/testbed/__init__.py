"""Real SSH servers for tests: hosts in network namespaces (`hosts.py`), one on loopback without root (`sshd.py`)."""
