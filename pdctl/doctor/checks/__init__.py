"""The checks, one module per area. Each has a ``CHECKS`` tuple; ``pdctl.doctor.registry`` lists them all."""
