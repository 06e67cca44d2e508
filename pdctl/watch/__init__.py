"""Watching a running cluster: poll, join what prefill and decode know, judge, show. One snapshot per tick feeds all."""
