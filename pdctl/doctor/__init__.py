"""Preflight: facts of the hosts, judged by pure checks, before anything is launched."""
