"""The command line: parse, call, render. One file per command; nothing else in pdctl knows click."""
