"""Mixed traffic with a random fault every 20 s: no wrong text, no hang, no growth. Ten minutes in `make soak`."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from tests.e2e.cluster import complete
from tests.e2e.faulty import MARGIN_S, MODEL, TIMEOUT_S, WORDS, Faulty

SECONDS = float(os.environ.get("PDCTL_SOAK_S", "120"))
SEED = int(os.environ.get("PDCTL_SOAK_SEED", "20260101"))
FAULT_EVERY_S = 20.0
# A request may queue behind others on two cores before its transfer begins; a hang is far beyond this.
HANG_S = 2 * TIMEOUT_S + MARGIN_S + 15

pytestmark = [pytest.mark.e2e, pytest.mark.root, pytest.mark.timeout(SECONDS + 600)]


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def shuffled(words: int, chooser: random.Random) -> str:
    """A prompt of a few possible lengths in tokens.

    vLLM's worker on a CPU keeps some memory for every length that it has seen, whatever the connector: 300 MiB after
    400 requests of as many lengths, 1 MiB after 200 of one.
    """
    every = WORDS * (words // len(WORDS))
    chooser.shuffle(every)
    return " ".join(every)


class Soak:
    def __init__(self, faulty: Faulty, chooser: random.Random) -> None:
        self.faulty, self.chooser = faulty, chooser
        self.results: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.slow: list[float] = []
        self.stop = threading.Event()
        self.lock = threading.Lock()

    def client(self, seed: int) -> None:
        chooser = random.Random(seed)
        shared = shuffled(150, random.Random(SEED))
        while not self.stop.is_set():
            prompt = shuffled(chooser.choice((20, 60, 200, 500)), chooser)
            if chooser.random() < 0.3:
                prompt = f"{shared} {shuffled(20, chooser)}"
            leave = chooser.uniform(0.02, 0.6) if chooser.random() < 0.2 else None
            status, text, seconds = self.faulty.ask(self.faulty.router, prompt, leave_after=leave)
            with self.lock:
                self.results["left" if leave is not None else str(status)] += 1
                if leave is None and seconds > HANG_S:
                    self.slow.append(seconds)
            if status == 200 and leave is None:
                # Prefill alone may be unreachable for a moment; the text is compared when it is back.
                self.compare(prompt, text)

    def compare(self, prompt: str, text: str) -> None:
        status, expected, _ = self.faulty.ask(self.faulty.prefill, prompt)
        if status == 200 and text != expected:
            with self.lock:
                self.wrong.append(f"{prompt[:40]!r}: {text!r}, prefill alone: {expected!r}")

    def faults(self) -> list[tuple[str, Callable[[], None]]]:
        one, two = self.faulty.testbed.names(2)
        call = self.faulty.testbed.call

        def link(cut: str, seconds: float) -> None:
            call(cut, one, two)
            time.sleep(seconds)
            call("heal", one, two)

        def pause(number: int, seconds: float) -> None:
            with stopped(self.faulty.worker(number)):
                time.sleep(seconds)

        def slow() -> None:
            call("slow", one, "30mbit")
            time.sleep(5)
            call("fast", one)

        return [
            ("link cut for 3 s", lambda: link("cut", 3)),
            ("link cut one way for 3 s", lambda: link("cut-oneway", 3)),
            ("prefill stopped for 3 s", lambda: pause(1, 3)),
            ("decode stopped for 3 s", lambda: pause(2, 3)),
            ("prefill stopped beyond the time-out", lambda: pause(1, TIMEOUT_S + 2)),
            ("slow link for 5 s", slow),
        ]


def test_soak(faulty: Faulty) -> None:
    print(f"seed {SEED} (PDCTL_SOAK_SEED), {SECONDS:.0f} s (PDCTL_SOAK_S)")
    chooser = random.Random(SEED)
    soak = Soak(faulty, chooser)
    memory: list[int] = []
    clients = [threading.Thread(target=soak.client, args=(SEED + n,), daemon=True) for n in range(3)]
    for thread in clients:
        thread.start()
    end = time.monotonic() + SECONDS
    try:
        while time.monotonic() < end:
            if not memory and end - time.monotonic() < SECONDS / 2:
                # From here on: the first prompts of each length take room that is kept.
                memory = [status["rss_bytes"] for status in instances(faulty)]
            time.sleep(FAULT_EVERY_S * 0.6)
            name, fault = chooser.choice(soak.faults())
            print(f"fault: {name}")
            fault()
            time.sleep(FAULT_EVERY_S * 0.4)
    finally:
        soak.stop.set()
        for thread in clients:
            thread.join(HANG_S + 30)
    print(dict(soak.results))
    assert not any(thread.is_alive() for thread in clients), "a request hangs"
    assert soak.wrong == []
    assert soak.slow == []
    assert soak.results["200"] > SECONDS / 10
    # TCP retransmissions after a cut may hold the last transfer for a while.
    faulty.calm(within_s=60)
    faulty.works()
    assert complete(faulty.router, "after the soak", model=MODEL)
    grown = [after["rss_bytes"] - before for after, before in zip(instances(faulty), memory, strict=True)]
    print("grown since half time, MiB:", [round(size / 2**20) for size in grown])
    assert max(grown) < 150 * 2**20, grown


def instances(faulty: Faulty) -> list[dict]:
    return faulty.cluster.pdctl("status", "--json").json()["instances"]
