"""Times every hook of PdPushConnector that the engine calls on its main thread. For benchmarks/hook_time.py alone.

Loaded by Python itself when this folder is on PYTHONPATH. Each process appends lines to ``$HOOK_TIMES``: the hook of a
step that comes last, microseconds of all hooks of that step together, and of CPU time of this thread.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import os
import sys
import time
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

MODULE = "pdctl_connector.connector"
HOOKS = (
    "on_new_request",
    "get_num_new_matched_tokens",
    "update_state_after_alloc",
    "build_connector_meta",
    "update_connector_output",
    "request_finished",
    "request_finished_all_groups",
    "has_pending_push_work",
    "bind_connector_metadata",
    "start_load_kv",
    "wait_for_save",
    "get_finished",
    "get_transfer_results",
    "get_block_ids_with_load_errors",
    "build_connector_worker_meta",
    "get_kv_connector_stats",
    "clear_connector_metadata",
)
ENDS_STEP = ("build_connector_meta", "get_finished", "get_transfer_results")


class _Times:
    def __init__(self) -> None:
        self.wall = self.cpu = 0.0
        self.depth = 0
        self.lines: list[str] = []

    def wrap(self, name: str, hook: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(hook)
        def timed(*args: Any, **kwargs: Any) -> Any:
            if self.depth:
                return hook(*args, **kwargs)
            self.depth += 1
            wall, cpu = time.perf_counter(), time.thread_time()
            try:
                return hook(*args, **kwargs)
            finally:
                self.depth -= 1
                self.wall += time.perf_counter() - wall
                self.cpu += time.thread_time() - cpu
                if name in ENDS_STEP:
                    self.lines.append(f"{name} {self.wall * 1e6:.1f} {self.cpu * 1e6:.1f}\n")
                    self.wall = self.cpu = 0.0
                    if len(self.lines) >= 200:
                        with open(os.environ["HOOK_TIMES"], "a") as file:  # noqa: PTH123  # nothing more is loaded here
                            file.writelines(self.lines)
                        self.lines.clear()

        return timed


class _Loader(importlib.abc.Loader):
    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self.loader.exec_module(module)
        times = _Times()
        for name in HOOKS:
            hook = getattr(module.PdPushConnector, name, None)
            if hook is not None:
                setattr(module.PdPushConnector, name, times.wrap(name, hook))


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != MODULE:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None:
            spec.loader = _Loader(spec.loader)
        return spec


if os.environ.get("HOOK_TIMES"):
    sys.meta_path.insert(0, _Finder())
