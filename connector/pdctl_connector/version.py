"""The connector's version: that of the pdctl distribution it is part of."""

__version__ = "0.1.0"
