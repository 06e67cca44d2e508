"""Notifications: every message survives the trip, and nothing that arrives does more than raise `WireError`."""

from __future__ import annotations

import struct
import tracemalloc
from typing import Any

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pdctl_connector import wire

KEYS = st.text(min_size=1, max_size=wire.MAX_KEY).filter(lambda text: text.isprintable())
NAMES = st.text(st.characters(codec="utf-8"), min_size=1, max_size=wire.MAX_TEXT)
TEXTS = st.text(st.characters(codec="utf-8"), max_size=wire.MAX_TEXT)
COUNTS = st.integers(0, 2**31 - 1)
RANKS = st.integers(0, 65535)


@st.composite
def registrations(draw: st.DrawFn) -> wire.Register:
    groups = draw(st.lists(st.lists(COUNTS, max_size=20, unique=True), min_size=1, max_size=4).filter(any))
    tp_size = draw(st.integers(1, 65536))
    return wire.Register(
        key=draw(KEYS),
        attempt=draw(COUNTS),
        engine_id=draw(NAMES),
        request_id=draw(TEXTS),
        host=draw(NAMES),
        port=draw(st.integers(1, 65535)),
        tp_size=tp_size,
        tp_rank=draw(st.integers(0, min(tp_size, 65536) - 1)),
        block_ids=groups,
        first_block=draw(st.lists(COUNTS, min_size=len(groups), max_size=len(groups))),
        prompt_tokens=draw(st.integers(1, 2**31 - 1)),
        token_hash=draw(st.just(b"") | st.binary(min_size=8, max_size=8)),
        mode=draw(st.sampled_from(["whole", "progressive"])),
    )


MESSAGES = st.one_of(
    registrations(),
    st.builds(wire.RegisterZero, KEYS, COUNTS, NAMES, TEXTS),
    st.builds(wire.Done, KEYS, COUNTS, RANKS, st.integers(1, 65536), st.integers(0, 2**63 - 1)),
    st.builds(
        wire.Failed, KEYS, COUNTS, RANKS, st.integers(1, 65536), st.sampled_from(sorted(wire.FAIL_REASONS)), TEXTS
    ),
    st.builds(wire.Cancel, KEYS, COUNTS, NAMES, NAMES, st.integers(1, 65535), st.integers(1, 65536)),
    st.builds(wire.Alive, KEYS, COUNTS, st.sampled_from(["prefilling", "ready", "posted"])),
    st.builds(
        wire.CancelAck,
        KEYS,
        COUNTS,
        RANKS,
        st.integers(1, 65536),
        st.sampled_from(["cancelled", "completed", "failed"]),
    ),
    st.builds(wire.Heartbeat, st.lists(KEYS, min_size=1, max_size=20)),
)

REG: dict[str, Any] = {
    "key": "cmpl-1",
    "attempt": 0,
    "engine_id": "engine-d",
    "request_id": "cmpl-1-0123abcd",
    "host": "10.0.0.2",
    "port": 5600,
    "tp_size": 2,
    "tp_rank": 1,
    "block_ids": [[4, 5, 6], [9]],
    "first_block": [2, 0],
    "prompt_tokens": 77,
    "token_hash": b"12345678",
}


def notification(letter: bytes, payload: bytes, version: int = wire.WIRE_VERSION) -> bytes:
    return wire.PREFIX + bytes((version,)) + letter + payload


def fault_of(data: bytes) -> str:
    with pytest.raises(wire.WireError) as raised:
        wire.decode(data)
    return raised.value.fault


def decode_or_refuse(data: bytes) -> wire.Message | None:
    """Decode; anything raised but `WireError` fails the test. What is accepted must be sendable as it is."""
    try:
        message = wire.decode(data)
    except wire.WireError:
        return None
    if message is not None:
        assert wire.decode(wire.encode(message)) == message
    return message


# --- trips ------------------------------------------------------------------------------------------------------------


@given(MESSAGES)
def test_every_message_survives_the_trip(message: wire.Message) -> None:
    data = wire.encode(message)
    assert data.startswith(b"PDCTL:\x01")
    assert len(data) <= wire.MAX_MESSAGE_BYTES
    assert wire.decode(data) == message


def test_the_bytes_of_a_message_stay_what_they_are() -> None:
    # Changing any of these needs another WIRE_VERSION.
    assert wire.WIRE_VERSION == 1
    assert wire.encode(wire.Cancel("k", 3, "e", "h", 5600, 8)) == b"PDCTL:\x01C" + msgspec.msgpack.encode(
        ["k", 3, "e", "h", 5600, 8]
    )
    assert wire.encode(wire.Alive("k", 3, "ready")) == b"PDCTL:\x01L" + msgspec.msgpack.encode(["k", 3, "ready"])
    assert wire.encode(wire.Register(**REG)) == b"PDCTL:\x01R" + msgspec.msgpack.encode([*REG.values(), "whole"])
    assert wire.encode(wire.RegisterZero("k", 0, "e", "r")) == b"PDCTL:\x01Z" + msgspec.msgpack.encode(
        ["k", 0, "e", "r"]
    )
    assert wire.encode(wire.Done("k", 0, 1, 2, 99)) == b"PDCTL:\x01D" + msgspec.msgpack.encode(["k", 0, 1, 2, 99])
    assert wire.encode(wire.Failed("k", 0, 1, 2, "expired", "d")) == b"PDCTL:\x01F" + msgspec.msgpack.encode(
        ["k", 0, 1, 2, "expired", "d"]
    )
    assert wire.encode(wire.CancelAck("k", 0, 1, 2, "cancelled")) == b"PDCTL:\x01A" + msgspec.msgpack.encode(
        ["k", 0, 1, 2, "cancelled"]
    )
    assert wire.encode(wire.Heartbeat(["a", "b"])) == b"PDCTL:\x01H" + msgspec.msgpack.encode([["a", "b"]])


def test_the_largest_messages_fit() -> None:
    # The longest encodings: five bytes an id, four bytes a character.
    reg = wire.Register(**{**REG, "block_ids": [list(range(2**31 - wire.MAX_BLOCKS, 2**31))], "first_block": [0]})
    assert wire.decode(wire.encode(reg)) == reg
    heartbeat = wire.Heartbeat(["\U0001f600" * wire.MAX_KEY] * wire.MAX_HEARTBEAT_KEYS)
    with pytest.raises(wire.WireError, match="oversized"):
        wire.encode(heartbeat)
    heartbeat = wire.Heartbeat(["x" * wire.MAX_KEY] * wire.MAX_HEARTBEAT_KEYS)
    assert wire.decode(wire.encode(heartbeat)) == heartbeat


# --- limits -----------------------------------------------------------------------------------------------------------

TOO_MANY = wire.MAX_BLOCKS + 1


@pytest.mark.parametrize(
    "change",
    [
        {"key": ""},
        {"key": "x" * (wire.MAX_KEY + 1)},
        {"key": 7},
        {"attempt": -1},
        {"attempt": 2**31},
        {"attempt": True},
        {"engine_id": ""},
        {"engine_id": "x" * 257},
        {"host": ""},
        {"request_id": "x" * 257},
        {"port": 0},
        {"port": 65536},
        {"tp_size": 0},
        {"tp_size": 65537},
        {"tp_rank": 2},
        {"block_ids": [], "first_block": []},
        {"block_ids": [[], []]},
        {"block_ids": [[1, 1], []]},
        {"block_ids": [[-1], []]},
        {"block_ids": [[2**31], []]},
        {"block_ids": [list(range(TOO_MANY)), []]},
        {"block_ids": [list(range(TOO_MANY // 2 + 1)), list(range(TOO_MANY // 2 + 1))]},
        {"block_ids": [[1]] * 65, "first_block": [0] * 65},
        {"block_ids": [1, 2]},
        {"first_block": [0]},
        {"first_block": [0, 0, 0]},
        {"first_block": [0, -1]},
        {"prompt_tokens": 0},
        {"token_hash": b"1234567"},
        {"token_hash": b"123456789"},
        {"token_hash": "12345678"},
        {"mode": "layerwise"},
    ],
    ids=lambda change: ",".join(change),
)
def test_a_registration_outside_its_limits_is_neither_sent_nor_accepted(change: dict[str, Any]) -> None:
    values = {**REG, "mode": "whole", **change}
    with pytest.raises((wire.WireError, ValueError, TypeError)):
        wire.encode(wire.Register(**values))
    assert fault_of(notification(b"R", msgspec.msgpack.encode(list(values.values())))) == "invalid"


@pytest.mark.parametrize(
    ("letter", "values"),
    [
        (b"D", ["k", 0, 0, 0, 1]),  # no writers at all
        (b"D", ["k", 0, 65536, 1, 1]),
        (b"D", ["k", 0, 0, 1, -1]),
        (b"D", ["k", 0, 0, 1, 2**63]),
        (b"D", ["k", 0, 0, 1, 1.5]),
        (b"D", ["k", 0, 0, 1]),  # one too few
        (b"D", ["k", 0, 0, 1, 1, 1]),  # one too many
        (b"D", {"key": "k", "attempt": 0, "writer": 0, "writers": 1, "bytes": 1}),
        (b"D", None),
        (b"F", ["k", 0, 0, 1, "", ""]),
        (b"F", ["k", 0, 0, 1, "Upper", ""]),
        (b"F", ["k", 0, 0, 1, "new\nline", ""]),
        (b"F", ["k", 0, 0, 1, "line\n", ""]),
        (b"F", ["k", 0, 0, 1, "x" * 33, ""]),
        (b"F", ["k", 0, 0, 1, "expired", "x" * 257]),
        (b"A", ["k", 0, 0, 1, "maybe"]),
        (b"C", ["", 0, 1]),
        (b"C", [None, 0, 1]),
        (b"C", ["k", 0, 0]),
        (b"C", ["k", 0]),
        (b"H", [[]]),
        (b"H", [["k"] * (wire.MAX_HEARTBEAT_KEYS + 1)]),
        (b"H", [["x" * (wire.MAX_KEY + 1)]]),
        (b"H", [["k", ""]]),
        (b"H", [{"k": 1}]),
        (b"Z", ["k", 0, "", "r"]),
    ],
)
def test_a_value_outside_its_limits_is_refused(letter: bytes, values: Any) -> None:
    assert fault_of(notification(letter, msgspec.msgpack.encode(values))) == "invalid"


def test_an_unknown_reason_of_a_later_version_is_accepted() -> None:
    message = wire.Failed("k", 0, 0, 1, "out-of-luck")
    assert wire.decode(wire.encode(message)) == message


def test_what_utf8_cannot_carry_is_not_sent() -> None:
    with pytest.raises(wire.WireError) as raised:
        wire.encode(wire.Cancel("\ud800", 0, "e", "h", 1, 1))
    assert raised.value.fault == "invalid"
    assert raised.value.message_kind == "CANCEL"
    assert wire.encode(wire.Failed("k", 0, 0, 1, "internal", wire.clip("\ud800" + "x" * 999)))


# --- what arrives -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "data", [b"", b"P", b"PDCTL", b"pdctl:\x01C", b"PUSH_REG:\x80", b"HB:a,b", b"cmpl-1-0123abcd:8", b"\x00" * 100]
)
def test_a_foreign_notification_is_none(data: bytes) -> None:
    assert wire.decode(data) is None


def test_each_fault_is_told_apart() -> None:
    good = wire.encode(wire.Cancel("k", 0, "e", "h", 1, 1))
    assert fault_of(wire.PREFIX) == "malformed"
    assert fault_of(wire.PREFIX + b"\x01") == "malformed"
    assert fault_of(wire.PREFIX + b"\x02C" + good[8:]) == "version"
    assert fault_of(wire.PREFIX + b"\x01?" + good[8:]) == "kind"
    assert fault_of(good[:-1]) == "malformed"
    assert fault_of(good + b"\x00") == "malformed"
    assert fault_of(notification(b"C", b"\x96\xa2\xff\xfe\x00\xa1e\xa1h\x01\x01")) == "malformed"  # not UTF-8
    assert fault_of(good + b"\x00" * wire.MAX_MESSAGE_BYTES) == "oversized"


def test_an_error_names_the_message_and_not_its_content() -> None:
    with pytest.raises(wire.WireError) as raised:
        wire.decode(notification(b"D", msgspec.msgpack.encode(["the-secret-key", 0, 0, 0, 1])))
    assert raised.value.message_kind == "DONE"
    assert "DONE: invalid" in str(raised.value)
    assert "the-secret-key" not in str(raised.value)


def test_an_error_is_short_whatever_arrived() -> None:
    error = wire.WireError("invalid", "REG", "x" * 100_000)
    assert len(str(error)) < 300


HUGE = struct.pack(">I", 2**32 - 1)
REG_HEAD = b"\x9d\xa1k\x00\xa1e\xa1r\xa1h\x05\x02\x01"  # up to tp_rank; block_ids come next


@pytest.mark.parametrize(
    "data",
    [
        notification(b"C", b"\xdd" + HUGE),
        notification(b"C", b"\xdf" + HUGE),
        notification(b"C", b"\x93\xdb" + HUGE + b"k"),
        notification(b"C", b"\x93\xc6" + HUGE + b"k"),
        notification(b"C", b"\x93\xc9" + HUGE + b"\x01k"),
        notification(b"C", b"\x93\xa1k\xdd" + HUGE),
        notification(b"H", b"\x91\xdd" + HUGE),
        notification(b"R", REG_HEAD + b"\xdd" + HUGE),
        notification(b"R", REG_HEAD + b"\x91\xdd" + HUGE),
        # Sixty-four groups that each claim as many blocks as are allowed.
        notification(b"R", REG_HEAD + b"\xdc\x00\x40" + (b"\xdd" + struct.pack(">I", wire.MAX_BLOCKS)) * 64),
        notification(b"H", b"\x91" * 1_000_000),
        notification(b"C", b"\x91" * 1_000_000),
        notification(b"C", b"\x93\xa1k" + b"\x91" * 1_000_000),
        notification(b"C", b"\x93\xa1k" + b"\x81\xa1k" * 300_000),
        notification(b"R", REG_HEAD + b"\x91" * 1_000_000),
        notification(b"C", b"\x00" * 8_000_000),
    ],
    ids=range(16),
)
def test_claims_of_size_and_depth_cost_nothing(data: bytes) -> None:
    tracemalloc.start()
    try:
        decode_or_refuse(data)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # The list of block ids that a header may announce, and nothing that grows with a claim beyond that.
    assert peak < 2 * 8 * wire.MAX_BLOCKS


@pytest.mark.parametrize(
    "data",
    [
        notification(b"H", b"\x91\xdd" + HUGE),
        notification(b"R", REG_HEAD + b"\xdd" + HUGE),
        notification(b"R", REG_HEAD + b"\x91\xdd" + HUGE),
    ],
    ids=["keys", "groups", "blocks"],
)
def test_a_claimed_length_is_refused_by_its_limit(data: bytes) -> None:
    # Not by running out of data, before which a list of that length may have been made.
    assert fault_of(data) == "invalid"


@given(st.binary(max_size=300))
@example(b"")
def test_random_bytes_after_a_valid_header(payload: bytes) -> None:
    for letter in (b"R", b"Z", b"D", b"F", b"C", b"A", b"H"):
        decode_or_refuse(notification(letter, payload))


@given(st.binary(max_size=100))
def test_random_bytes(data: bytes) -> None:
    decode_or_refuse(data)
    decode_or_refuse(wire.PREFIX + data)


@pytest.mark.slow
@given(MESSAGES, st.data())
@settings(max_examples=300)
def test_mutated_messages(message: wire.Message, data: st.DataObject) -> None:
    bytes_ = bytearray(wire.encode(message))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(bytes_)))
        action = data.draw(st.sampled_from(["flip", "insert", "delete", "cut", "repeat"]))
        if action == "flip" and at < len(bytes_):
            bytes_[at] ^= data.draw(st.integers(1, 255))
        elif action == "insert":
            bytes_[at:at] = data.draw(st.binary(min_size=1, max_size=8))
        elif action == "delete":
            del bytes_[at : at + data.draw(st.integers(1, 8))]
        elif action == "cut":
            del bytes_[at:]
        else:
            bytes_[at:at] = bytes_[: data.draw(st.integers(0, len(bytes_)))]
    decode_or_refuse(bytes(bytes_))


JSON_LIKE = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=5)
    | st.binary(max_size=5),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=20,
)


@pytest.mark.slow
@given(st.sampled_from([b"R", b"Z", b"D", b"F", b"C", b"A", b"H"]), st.lists(JSON_LIKE, max_size=14))
def test_well_formed_arrays_of_anything(letter: bytes, values: list[Any]) -> None:
    decode_or_refuse(notification(letter, msgspec.msgpack.encode(values)))


# --- keys -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("request_id", "params", "randomized", "key"),
    [
        ("cmpl-a-0-0123abcd", None, True, "cmpl-a-0"),
        ("cmpl-a-0-0123abcd", {}, True, "cmpl-a-0"),
        ("cmpl-a-0-0123abcd", {"transfer_id": "t-1"}, True, "t-1"),
        ("cmpl-a-0-0123abcd", {"transfer_id": "t-1-0123abcd"}, True, "t-1-0123abcd"),  # a router's id is left alone
        ("cmpl-a-0-0123abcd", {"transfer_id": ""}, True, "cmpl-a-0"),
        ("cmpl-a-0-0123abcd", {"transfer_id": 17}, True, "cmpl-a-0"),
        ("cmpl-a-0-0123abcd", {"transfer_id": None}, True, "cmpl-a-0"),
        # Randomization off: these are two requests.
        ("a-00000001", None, False, "a-00000001"),
        ("a-00000002", None, False, "a-00000002"),
        # Only one suffix, and only one that vLLM makes.
        ("a-00000001-0123abcd", None, True, "a-00000001"),
        ("a-0123ABCD", None, True, "a-0123ABCD"),
        ("a-0123abc", None, True, "a-0123abc"),
        ("a-0123abcd\n", None, True, "a-0123abcd\n"),
        ("-0123abcd", None, True, "-0123abcd"),
    ],
)
def test_transfer_key(request_id: str, params: dict[str, Any] | None, randomized: bool, key: str) -> None:
    assert wire.transfer_key(request_id, params, randomized=randomized) == key


@given(st.text(min_size=1), st.text(max_size=600), st.booleans())
@example("\ud800", "", True)
@example("x" * 300 + "-0123abcd", "", True)
@example("x", "y" * 257, False)
def test_any_key_can_be_sent(request_id: str, transfer_id: str, randomized: bool) -> None:
    key = wire.transfer_key(request_id, {"transfer_id": transfer_id}, randomized=randomized)
    assert wire.decode(wire.encode(wire.Cancel(key, 0, "e", "h", 1, 1))) == wire.Cancel(key, 0, "e", "h", 1, 1)


def test_both_sides_shorten_a_long_id_alike_and_keep_ids_apart() -> None:
    name = "x" * 1000
    prefill = wire.transfer_key(f"{name}-0123abcd", None, randomized=True)
    decode = wire.transfer_key(f"{name}-89abcdef", None, randomized=True)
    assert prefill == decode
    assert len(prefill) == wire.MAX_KEY
    assert prefill.startswith("xxx")
    assert wire.transfer_key(f"{name}y-0123abcd", None, randomized=True) != prefill


# --- token hash -------------------------------------------------------------------------------------------------------


def test_the_token_hash_is_the_same_everywhere() -> None:
    # BLAKE2b-64 over little-endian 64-bit integers, whatever the sequence is.
    assert wire.token_hash([]) == bytes.fromhex("e4a6a0577479b2b4")
    assert wire.token_hash([1, 2, 151_643]) == bytes.fromhex("79444fe0ae60c9d1")
    assert wire.token_hash((1, 2, 151_643)) == wire.token_hash(iter([1, 2, 151_643]))


@given(st.lists(st.integers(0, 200_000), min_size=1, max_size=50), st.data())
def test_the_token_hash_tells_prompts_apart(tokens: list[int], data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(tokens) - 1))
    other = [*tokens[:at], tokens[at] + data.draw(st.integers(1, 1000)), *tokens[at + 1 :]]
    assert len(wire.token_hash(tokens)) == wire.TOKEN_HASH_BYTES
    assert wire.token_hash(tokens) != wire.token_hash(other)
    assert wire.token_hash(tokens) != wire.token_hash([*tokens, 0])
