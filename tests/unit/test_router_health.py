import pytest

from pdctl.lifecycle.router_health import RouterHealth, router_health
from pdctl.plan import make_plan
from pdctl.spec import parse


def test_nothing_said_is_the_routers_own_setting() -> None:
    assert router_health(()) == RouterHealth(interval_s=60, successes=2, timeout_s=5)
    assert router_health(()).notices_within_s == 185


def test_what_a_plan_says_is_read_back() -> None:
    text = "cluster: small\nmodel: /m\naccelerator: cpu\nfabric: tcp\nprefill: {hosts: [a]}\ndecode: {hosts: [b]}\n"
    text += "router: {host: a, args: {health-check-timeout-secs: 7}}\n"
    plan = make_plan(parse(text, file="cluster.yaml", environ={}), environ={}, connector_digest="0" * 64)
    health = router_health(plan.router.argv)
    assert health == RouterHealth(interval_s=3, successes=2, timeout_s=7)
    assert health.notices_within_s == 16


@pytest.mark.parametrize(
    ("argv", "interval_s"),
    [
        (["--health-check-interval-secs", "8"], 8),
        (["--health-check-interval-secs=8"], 8),
        (["--health-check-interval-secs", "8", "--health-check-interval-secs", "9"], 9),
        (["--health-check-interval-secs"], 60),
        (["--health-check-interval-secs", "--port"], 60),
        (["--health-check-interval-secs", "-4"], 60),
        (["--health-check-interval-secs", "\u0665"], 60),
        (["--health-check-interval-secs", "9" * 400], 60),
    ],
)
def test_how_an_interval_may_be_written(argv: list[str], interval_s: float) -> None:
    assert router_health(argv).interval_s == interval_s


def test_the_words_say_what_it_waits_for() -> None:
    assert RouterHealth(3, 2, 5).words == "takes an instance back after 2 good answers in a row, one every 3 s"
    assert RouterHealth(60, 1, 5).words == "takes an instance back after 1 good answer, one every 60 s"
