"""The dashboard, in three parts that do not do each other's work.

Fetch: ``source``, ``feed``. Format, without Textual: ``format``, ``states``, ``rows``, ``details``, ``summary``. Place:
``place`` (pure), ``theme`` and the widgets, and ``app``, which holds them together.
"""
