"""Hosts: run commands on them, over SSH or locally, one or many at a time."""
