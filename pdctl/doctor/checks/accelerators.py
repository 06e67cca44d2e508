"""ACC0xx: the accelerators that the plan counts on are there, free, and open to the network cards. Pure.

Clusters with ``accelerator: cpu`` have nothing to check here.
"""

from __future__ import annotations

from pdctl.doctor.checks import accelerators_cuda, accelerators_neuron
from pdctl.doctor.findings import Check

CHECKS: tuple[Check, ...] = (*accelerators_cuda.CHECKS, *accelerators_neuron.CHECKS)
