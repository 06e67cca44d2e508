"""The fault suite: what upstream's push connector answers with a hang, a leak or wrong text, made on purpose.

Two hosts, real vLLM, NIXL over UCX TCP, the router. After each fault this must hold: the client got a right answer or
a clear error within `timeout_s` + 5 s; nothing is in flight or held; and the next requests are right. The F-numbers are
those of docs/connector.md. One cluster for the folder; tests that kill an instance bring it back with `pdctl up`.
"""

from __future__ import annotations

import os
import random
import signal
import socket
import threading
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.e2e.cluster import complete, complete_all
from tests.e2e.faulty import LEASE_S, MARGIN_S, MODEL, PREFILL_LEG, TIMEOUT_S, Faulty, text_of

pytestmark = [pytest.mark.e2e, pytest.mark.root, pytest.mark.timeout(600)]


@pytest.fixture(autouse=True)
def sound_afterwards(faulty: Faulty) -> Iterator[None]:
    """Every fault ends in calm, and in right answers."""
    yield
    for number in (1, 2):
        faulty.testbed.call("fast", faulty.testbed.name(number))
    faulty.testbed.call("heal", faulty.testbed.name(1), faulty.testbed.name(2))
    faulty.calm()
    faulty.works()


def in_time(seconds: float) -> None:
    assert seconds < TIMEOUT_S + MARGIN_S, f"the client waited {seconds:.1f} s"


def test_f02_client_leaves_while_prefill_works(faulty: Faulty) -> None:
    for delay in (0.02, 0.1, 0.3):
        faulty.ask(faulty.router, faulty.fresh(700), leave_after=delay)


def test_f03_decode_leg_alone_is_left(faulty: Faulty) -> None:
    for delay in (0.05, 0.2, 0.35):
        prompt, name = faulty.fresh(500), f"f03-{delay}-{faulty.serial}"
        with ThreadPoolExecutor(1) as pool:
            other = pool.submit(faulty.prefill_leg, prompt, name)
            faulty.decode_leg(prompt, name, leave_after=delay)
            assert other.result()[0] == 200


def test_f04_prefill_leg_is_left_after_decode_registered(faulty: Faulty) -> None:
    prompt, name = faulty.fresh(700), f"f04-{faulty.serial}"
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(faulty.decode_leg, prompt, name)
        time.sleep(0.05)
        faulty.ask(
            faulty.prefill, prompt, request_id=name, max_tokens=1, kv_transfer_params=PREFILL_LEG, leave_after=0.2
        )
        status, text, seconds = other.result()
    assert status == 500 or (status == 200 and text == faulty.alone(prompt))
    in_time(seconds)


def test_f04_f05_decode_leg_without_prefill_leg_fails_in_time(faulty: Faulty) -> None:
    before = faulty.outcomes(2)["decode/timed_out"]
    status, _, seconds = faulty.decode_leg(faulty.fresh(), f"f05-{faulty.serial}")
    assert status == 500
    assert seconds > TIMEOUT_S - 1
    in_time(seconds)
    assert faulty.outcomes(2)["decode/timed_out"] == before + 1


def test_f10_registration_after_the_lease_fails_at_once(faulty: Faulty) -> None:
    prompt, name = faulty.fresh(), f"f10-{faulty.serial}"
    assert faulty.prefill_leg(prompt, name)[0] == 200
    time.sleep(LEASE_S + 1.5)
    assert faulty.outcomes(1)["prefill/expired"] >= 1
    status, _, seconds = faulty.decode_leg(prompt, name)
    assert status == 500
    assert seconds < 3


def test_f13_two_requests_with_one_id_get_the_right_text_or_an_error(faulty: Faulty) -> None:
    name = f"f13-{faulty.serial}"
    prompts = [faulty.fresh(300), faulty.fresh(300)]
    with ThreadPoolExecutor(4) as pool:
        legs = [pool.submit(faulty.prefill_leg, prompt, name) for prompt in prompts]
        answers = [pool.submit(faulty.decode_leg, prompt, name) for prompt in prompts]
        for leg in legs:
            leg.result()
        for prompt, answer in zip(prompts, answers, strict=True):
            status, text, seconds = answer.result()
            assert status == 500 or text == faulty.alone(prompt)
            in_time(seconds)


def test_f15_prefill_computed_more_than_the_prompt(faulty: Faulty) -> None:
    prompt, name = faulty.fresh(100), f"f15-{faulty.serial}"
    assert faulty.prefill_leg(prompt, name, max_tokens=140, ignore_eos=True)[0] == 200
    status, text, _ = faulty.decode_leg(prompt, name)
    assert (status, text) == (200, faulty.alone(prompt))


def test_f16_different_prompts_under_one_id_are_refused_at_once(faulty: Faulty) -> None:
    prompt, name = faulty.fresh(100), f"f16-{faulty.serial}"
    other = ("x" if prompt[0] != "x" else "y") + prompt[1:]
    assert faulty.prefill_leg(other, name)[0] == 200
    status, _, seconds = faulty.decode_leg(prompt, name)
    assert status == 500
    assert seconds < 3


def test_f01_f31_prefix_hits_on_either_side(faulty: Faulty) -> None:
    prompt = faulty.fresh(150)
    expired = faulty.outcomes(1)["prefill/expired"]
    for tail in ("", "", " tail one", " tail one", " another tail with more words in it"):
        status, text, _ = faulty.ask(faulty.router, prompt + tail)
        assert (status, text) == (200, faulty.alone(prompt + tail))
    time.sleep(LEASE_S + 1)
    assert faulty.outcomes(1)["prefill/expired"] == expired


def test_f24_garbage_on_the_side_channel(faulty: Faulty) -> None:
    for number, port in ((1, 5600), (2, 5700)):
        for junk in (b"\xff" * 64, b"GET / HTTP/1.0\r\n\r\n", b"\x00" * 4096):
            with socket.create_connection((faulty.testbed.address(number), port), timeout=5) as connection:
                connection.sendall(junk)
    zmq = pytest.importorskip("zmq")
    with zmq.Context() as context, context.socket(zmq.REQ) as asker:
        asker.setsockopt(zmq.LINGER, 0)
        asker.connect(f"tcp://{faulty.testbed.address(1)}:5600")
        asker.send(b"\x93nonsense")
        assert asker.poll(300) == 0
    # Listeners still answer: an instance that is new must be able to join.
    assert faulty.cluster.pdctl("restart", "decode-0", timeout=300).code == 0


def test_f38_decode_has_little_memory(faulty: Faulty) -> None:
    prompts = [faulty.fresh(330) for _ in range(16)]
    routed = complete_all(faulty.router, prompts, model=MODEL, at_once=16)
    assert routed == complete_all(faulty.prefill, prompts, model=MODEL, at_once=4)


def test_f45_prefill_is_stopped_for_a_while(faulty: Faulty) -> None:
    prompt = faulty.fresh(700)
    pid = faulty.worker(1)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(faulty.ask, faulty.router, prompt)
        time.sleep(0.15)
        os.kill(pid, signal.SIGSTOP)
        time.sleep(3)
        os.kill(pid, signal.SIGCONT)
        status, text, seconds = answer.result()
    assert (status, text) == (200, faulty.alone(prompt))
    in_time(seconds)


def test_f05_prefill_is_stopped_for_too_long(faulty: Faulty) -> None:
    prompt = faulty.fresh(700)
    pid = faulty.worker(1)
    name = f"f05-{faulty.serial}"
    with ThreadPoolExecutor(2) as pool:
        other = pool.submit(faulty.prefill_leg, prompt, name)
        params = faulty.decode_params()
        answer = pool.submit(faulty.decode_leg, prompt, name, params=params)
        time.sleep(0.15)
        os.kill(pid, signal.SIGSTOP)
        try:
            status, _, seconds = answer.result()
        finally:
            os.kill(pid, signal.SIGCONT)
        assert status == 500
        in_time(seconds)
        other.result()


def test_f44_decode_is_stopped_during_the_write(faulty: Faulty) -> None:
    prompt = faulty.fresh(700)
    pid = faulty.worker(2)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(faulty.ask, faulty.router, prompt)
        time.sleep(0.3)
        os.kill(pid, signal.SIGSTOP)
        time.sleep(4)
        os.kill(pid, signal.SIGCONT)
        status, text, seconds = answer.result()
    assert (status, text) == (200, faulty.alone(prompt))
    in_time(seconds)


def test_f08_the_lease_is_shorter_than_the_write(faulty: Faulty) -> None:
    prompt = faulty.fresh(700)
    faulty.testbed.call("slow", faulty.testbed.name(1), "20mbit")
    # About 16 MiB at 20 Mbit/s: longer than the lease, and than the time-out once it is posted. Never wrong text.
    status, text, seconds = faulty.ask(faulty.router, prompt)
    faulty.testbed.call("fast", faulty.testbed.name(1))
    assert status == 500 or text == faulty.alone(prompt)
    assert seconds < 2 * TIMEOUT_S + MARGIN_S


def test_f08_a_slow_write_longer_than_the_lease_completes(faulty: Faulty) -> None:
    prompt = faulty.fresh(330)
    faulty.testbed.call("slow", faulty.testbed.name(1), "12mbit")
    status, text, _ = faulty.ask(faulty.router, prompt)
    faulty.testbed.call("fast", faulty.testbed.name(1))
    assert (status, text) == (200, faulty.alone(prompt))


def test_a_damaged_transfer_is_seen(faulty: Faulty) -> None:
    """The tests compare texts: that says something only if a wrong KV cache gives a wrong text."""
    prompts = [faulty.fresh(150) for _ in range(6)]
    with faulty.failing(1, "make_prepped_xfer:*:reverse"):
        damaged = [faulty.legs(prompt, f"damaged-{n}-{faulty.serial}") for n, prompt in enumerate(prompts)]
    assert [status for status, _, _ in damaged] == [200] * len(prompts)
    different = [text != faulty.alone(prompt) for prompt, (_, text, _) in zip(prompts, damaged, strict=True)]
    assert sum(different) >= len(prompts) - 1


@pytest.mark.parametrize("operation", ["make_prepped_xfer", "transfer"])
def test_f06_f18_a_write_that_cannot_be_posted_is_told_at_once(faulty: Faulty, operation: str) -> None:
    before = faulty.outcomes(1)["prefill/failed"]
    with faulty.failing(1, f"{operation}:*:raise"):
        status, _, seconds = faulty.legs(faulty.fresh(), f"f06-{operation}-{faulty.serial}")
    assert status == 500
    assert seconds < 3
    assert faulty.outcomes(1)["prefill/failed"] == before + 1


def test_f07_a_write_whose_state_cannot_be_read_is_an_error_in_time(faulty: Faulty) -> None:
    with faulty.failing(1, "check_xfer_state:*:raise"):
        prompt = faulty.fresh()
        status, text, seconds = faulty.legs(prompt, f"f07-{faulty.serial}")
    assert status == 500 or (status == 200 and text == faulty.alone(prompt))
    in_time(seconds)


@pytest.mark.parametrize("number", [1, 2])
def test_f17_an_error_while_reading_loses_no_message(faulty: Faulty, number: int) -> None:
    prompt, name = faulty.fresh(), f"f17-{number}-{faulty.serial}"
    with ThreadPoolExecutor(1) as pool:
        with faulty.failing(number, "get_new_notifs:*:raise"):
            answer = pool.submit(faulty.legs, prompt, name)
            time.sleep(1.5)
        status, text, seconds = answer.result()
    assert (status, text) == (200, faulty.alone(prompt))
    in_time(seconds)
    writer = faulty.health(number)["writer"]
    assert writer["alive"]
    assert writer["last_error"].startswith("notifications: nixlBackendError")


def test_a_lost_registration_is_sent_again(faulty: Faulty) -> None:
    prompt, name = faulty.fresh(), f"lost-{faulty.serial}"
    with ThreadPoolExecutor(1) as pool:
        with faulty.failing(2, "send_notif/REG:*:drop"):
            answer = pool.submit(faulty.legs, prompt, name)
            time.sleep(1.0)
        status, text, seconds = answer.result()
    assert (status, text) == (200, faulty.alone(prompt))
    in_time(seconds)


def test_registrations_that_come_twice_change_nothing(faulty: Faulty) -> None:
    with faulty.failing(2, "send_notif/REG:*:twice"):
        prompts = [faulty.fresh() for _ in range(5)]
        answers = [faulty.legs(prompt, f"twice-{n}-{faulty.serial}") for n, prompt in enumerate(prompts)]
    assert [text for _, text, _ in answers] == [faulty.alone(prompt) for prompt in prompts]


def test_a_failure_that_gets_lost_ends_in_decodes_time(faulty: Faulty) -> None:
    prompt, name = faulty.fresh(100), f"untold-{faulty.serial}"
    with faulty.failing(1, "send_notif/FAIL:*:drop"):
        assert faulty.prefill_leg("z" + prompt, name)[0] == 200
        status, _, seconds = faulty.decode_leg(prompt, name)
    assert status == 500
    in_time(seconds)


def test_a_writer_that_hangs_in_nixl_says_where_and_since_when(faulty: Faulty) -> None:
    with faulty.failing(1, "get_new_notifs:*:sleep=3"):
        time.sleep(2.8)
        writer = faulty.health(1)["writer"]
    assert (writer["alive"], writer["op"]) == (True, "get_new_notifs")
    assert writer["op_age_s"] > 0.5 or writer["heartbeat_age_s"] > 0.5


@pytest.mark.parametrize("cut", ["cut", "cut-oneway"])
def test_f07_f27_the_link_is_cut_during_the_write_and_healed(faulty: Faulty, cut: str) -> None:
    # Without the router: it sits beside prefill, so decode's answer could not reach it over the cut link either.
    prompt, name = faulty.fresh(500), f"f07-{cut}-{faulty.serial}"
    one, two = faulty.testbed.names(2)
    params = faulty.decode_params()
    with ThreadPoolExecutor(2) as pool:
        faulty.testbed.call("slow", one, "50mbit")
        other = pool.submit(faulty.prefill_leg, prompt, name)
        answer = pool.submit(faulty.decode_leg, prompt, name, params=params)
        time.sleep(0.5)
        deadline = time.monotonic() + 10
        while not faulty.posted() and not other.done() and time.monotonic() < deadline:
            time.sleep(0.05)
        faulty.testbed.call(cut, one, two)
        status, text, seconds = answer.result()
        assert other.result()[0] == 200
    faulty.testbed.call("fast", one)
    assert status != 200 or text == faulty.alone(prompt)
    assert seconds < 2 * TIMEOUT_S + MARGIN_S
    time.sleep(2)
    faulty.testbed.call("heal", one, two)
    # TCP's retransmission may take as long again as the cut before the old transfer ends and its blocks are free.
    faulty.calm(within_s=60)


def test_f25_prefill_is_killed_and_comes_back(faulty: Faulty) -> None:
    prompt = faulty.fresh(700)
    name = f"f25-{faulty.serial}"
    params = faulty.decode_params()
    with ThreadPoolExecutor(2) as pool:
        pool.submit(faulty.prefill_leg, prompt, name)
        answer = pool.submit(faulty.decode_leg, prompt, name, params=params)
        time.sleep(0.2)
        faulty.kill_instance(1)
        status, _, seconds = answer.result()
    assert status == 500
    in_time(seconds)
    # Decode goes on for ordinary requests.
    assert complete(faulty.decode, "still here", model=MODEL)
    # A leg with the old engine's identity fails soon too.
    status, _, seconds = faulty.decode_leg(faulty.fresh(), f"f25b-{faulty.serial}", params=params)
    assert status == 500
    in_time(seconds)
    result = faulty.cluster.pdctl("up", "--json", timeout=300)
    assert result.code == 0, result.err
    assert {i["name"]: i["action"] for i in result.json()["instances"]}["decode-0"] == "already-running"


def test_f26_decode_is_killed_and_comes_back(faulty: Faulty) -> None:
    prompt = faulty.fresh(700)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(faulty.ask, faulty.router, prompt)
        time.sleep(0.2)
        faulty.kill_instance(2)
        status, _, seconds = answer.result()
    assert status != 200
    in_time(seconds)
    result = faulty.cluster.pdctl("up", "--json", timeout=300)
    assert result.code == 0, result.err


@pytest.mark.long
def test_f09_f23_prefill_connects_late_or_never_to_a_new_decode_engine(faulty: Faulty) -> None:
    """The request that proves a new engine is the first one that prefill must connect for.

    The router outlives both: it sees decode die, and must take it back in time for the proof.
    """
    faulty.kill_instance(2)
    faulty.router_misses_one()
    with faulty.failing(1, "add_remote_agent:*:raise"):
        never = faulty.cluster.pdctl("up", timeout=300)
    assert never.code == 1
    assert "Traceback" not in never.err
    # Longer than the lease: the blocks must still be there when the WRITE is posted.
    with faulty.failing(1, f"add_remote_agent:*:sleep={LEASE_S + 1}"):
        late = faulty.cluster.pdctl("up", timeout=300)
    assert late.code == 0, late.err


def test_f19_life_signs_while_idle(faulty: Faulty) -> None:
    ages = []
    for _ in range(20):
        with urllib.request.urlopen(f"{faulty.prefill}/health", timeout=5):
            pass
        ages.append(max(faulty.health(n)["writer"]["heartbeat_age_s"] for n in (1, 2)))
        time.sleep(0.2)
    assert max(ages) < 1.0


def test_everything_at_once_under_load(faulty: Faulty) -> None:
    """Half of the clients leave at random moments; the others get right answers."""
    stop = threading.Event()

    def leaver() -> None:
        while not stop.is_set():
            faulty.ask(faulty.router, text_of(200, random.random()), leave_after=random.uniform(0.01, 0.5))

    leavers = [threading.Thread(target=leaver) for _ in range(2)]
    for thread in leavers:
        thread.start()
    try:
        faulty.works(12)
    finally:
        stop.set()
        for thread in leavers:
            thread.join()
