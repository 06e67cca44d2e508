"""The notifications that the two sides of a transfer send each other over NIXL.

A notification is the ASCII prefix ``PDCTL:``, a version byte, one byte for the kind and a msgpack array. NIXL tells
which agent sent it. See docs/protocol.md for what each message means and when it is sent.

What arrives is not trusted: `decode` raises `WireError` and nothing else, looks at the size first, and takes time and
memory in proportion to `MAX_MESSAGE_BYTES` at most. What is sent passes the same checks.
"""

from __future__ import annotations

import hashlib
import re
import sys
from array import array
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, ClassVar, Final, Literal

import msgspec
from msgspec import Meta

PREFIX: Final = b"PDCTL:"
WIRE_VERSION: Final = 1
"""Changes with any change of a message: both sides must have the same one."""

MAX_MESSAGE_BYTES: Final = 1 << 20
MAX_BLOCKS: Final = 1 << 17
"""Block ids in one registration, all groups together: 2 million tokens at 16 tokens a block."""
MAX_GROUPS: Final = 64
MAX_KEY: Final = 256
MAX_TEXT: Final = 256
MAX_HEARTBEAT_KEYS: Final = 1024
TOKEN_HASH_BYTES: Final = 8

_HEADER_BYTES: Final = len(PREFIX) + 2

Kind = Literal["REG", "REG_ZERO", "DONE", "FAIL", "CANCEL", "CANCEL_ACK", "ALIVE", "HB"]
Fault = Literal["oversized", "version", "kind", "malformed", "invalid"]
"""Why a notification of ours was refused: too long; another version; unknown kind; not msgpack; a type or value that
the message does not allow."""


class WireError(ValueError):
    """A notification that is ours by its prefix, and unusable.

    Attributes:
        fault: why, for counters.
        message_kind: which message it claims to be; empty when that is not known.
    """

    def __init__(self, fault: Fault, message_kind: str = "", detail: str = "") -> None:
        self.fault = fault
        self.message_kind = message_kind
        super().__init__(": ".join(word for word in (message_kind or "notification", fault, detail[:MAX_TEXT]) if word))


_Key = Annotated[str, Meta(min_length=1, max_length=MAX_KEY)]
_Text = Annotated[str, Meta(max_length=MAX_TEXT)]
_Name = Annotated[str, Meta(min_length=1, max_length=MAX_TEXT)]
_Count = Annotated[int, Meta(ge=0, lt=1 << 31)]
_Positive = Annotated[int, Meta(ge=1, lt=1 << 31)]
_Size = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
_Port = Annotated[int, Meta(ge=1, le=65535)]
_Ranks = Annotated[int, Meta(ge=1, le=65536)]
_Rank = Annotated[int, Meta(ge=0, lt=65536)]
_Group = Annotated[list[_Count], Meta(max_length=MAX_BLOCKS)]


class _Message(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    kind: ClassVar[Kind]

    key: _Key
    attempt: _Count


class Register(_Message, frozen=True):
    """REG, decode to prefill: these blocks wait for the KV of this prompt.

    Attributes:
        key: the transfer (`transfer_key`).
        attempt: the decode side's count of its tries for this key.
        engine_id: the decode engine. It changes at every start, so messages of a former process match nothing.
        request_id: vLLM's id of the request on the decode side; for people.
        host: side channel of the decode engine, for the handshake back.
        port: its port.
        tp_size: tensor-parallel ranks of the decode engine.
        tp_rank: the rank that sends this.
        block_ids: for each KV-cache group, the decode side's logical block ids to fill.
        first_block: for each group, the index in the prompt of the first of them. The blocks are consecutive from
            there, so both sides align by position and never by the length of a list.
        prompt_tokens: how many leading tokens the decode side will take as computed.
        token_hash: `token_hash` of those tokens; empty when they have no ids (embeddings).
        mode: whether prefill may write settled blocks before it is finished.
    """

    kind: ClassVar[Kind] = "REG"

    engine_id: _Name
    request_id: _Text
    host: _Name
    port: _Port
    tp_size: _Ranks
    tp_rank: _Rank
    block_ids: Annotated[list[_Group], Meta(min_length=1, max_length=MAX_GROUPS)]
    first_block: Annotated[list[_Count], Meta(min_length=1, max_length=MAX_GROUPS)]
    prompt_tokens: _Positive
    token_hash: Annotated[bytes, Meta(max_length=TOKEN_HASH_BYTES)]
    mode: Literal["whole", "progressive"] = "whole"

    def __post_init__(self) -> None:
        if len(self.first_block) != len(self.block_ids):
            raise ValueError(f"{len(self.block_ids)} groups of blocks, but {len(self.first_block)} first blocks")
        blocks = sum(map(len, self.block_ids))
        if not 1 <= blocks <= MAX_BLOCKS:
            raise ValueError(f"{blocks} blocks; 1 to {MAX_BLOCKS} are allowed (use REG_ZERO for none)")
        if any(len(set(group)) != len(group) for group in self.block_ids):
            raise ValueError("a block is named twice in one group")
        if len(self.token_hash) not in (0, TOKEN_HASH_BYTES):
            raise ValueError(f"a token hash of {len(self.token_hash)} bytes")
        if self.tp_rank >= self.tp_size:
            raise ValueError(f"rank {self.tp_rank} of {self.tp_size}")


class RegisterZero(_Message, frozen=True):
    """REG_ZERO, decode to prefill: the whole prompt is here already; free your blocks. No answer is expected.

    Attributes:
        key: the transfer.
        attempt: the try.
        engine_id: the decode engine.
        request_id: vLLM's id of the request on the decode side; for people.
    """

    kind: ClassVar[Kind] = "REG_ZERO"

    engine_id: _Name
    request_id: _Text


class _Final(_Message, frozen=True):
    # One rank of prefill says that it will touch the decode rank's blocks no more.
    writer: _Rank
    writers: _Ranks


class Done(_Final, frozen=True):
    """DONE, prefill to decode: this rank's WRITEs for the request are complete.

    Attributes:
        key: the transfer.
        attempt: the try.
        writer: which prefill rank says so (over all pipeline and tensor ranks). The same one twice counts once.
        writers: how many prefill ranks write to this decode rank; the request is complete when all of them said DONE.
        bytes: what this rank wrote to this decode rank.
    """

    kind: ClassVar[Kind] = "DONE"

    bytes: _Size


class Failed(_Final, frozen=True):
    """FAIL, prefill to decode: this rank will not deliver. Sent only when none of its WRITEs is in flight any more.

    Attributes:
        key: the transfer.
        attempt: the try.
        writer: which prefill rank.
        writers: how many prefill ranks write to this decode rank; the others may still be writing.
        reason: a stable word, one of `FAIL_REASONS` or of a later version.
        detail: more, for people.
    """

    kind: ClassVar[Kind] = "FAIL"

    reason: Annotated[str, Meta(pattern=r"^[a-z][a-z-]{0,31}\Z")]
    detail: _Text = ""


FAIL_REASONS: Final = frozenset(
    {
        "aborted",  # the request ended on the prefill side without KV
        "duplicate",  # another live request has the same key
        "expired",  # the prefill side gave its blocks up before the registration came
        "handshake",  # the decode engine could not be reached for the handshake back
        "internal",  # a bug on the prefill side; its log has the traceback
        "invalid",  # the registration does not fit the decode engine's handshake data
        "mismatch",  # the two sides have different tokens
        "overloaded",  # a table is full
        "shutdown",  # the prefill instance is stopping
        "transfer",  # NIXL could not post or complete a WRITE
    }
)


class Cancel(_Message, frozen=True):
    """CANCEL, decode to prefill: the request is gone. Sent again until it is acknowledged.

    Attributes:
        key: the transfer.
        attempt: the try; a registration of this try that comes later is refused.
        engine_id: the decode engine. This and the rest let a rank that never saw the registration answer.
        host: side channel of the decode engine.
        port: its port.
        tp_size: tensor-parallel ranks of the decode engine.
    """

    kind: ClassVar[Kind] = "CANCEL"

    engine_id: _Name
    host: _Name
    port: _Port
    tp_size: _Ranks


class CancelAck(_Final, frozen=True):
    """CANCEL_ACK, prefill to decode: the answer to CANCEL. Sent only when none of this rank's WRITEs is in flight.

    Attributes:
        key: the transfer.
        attempt: the try.
        writer: which prefill rank.
        writers: how many prefill ranks write to this decode rank.
        state: how the transfer ended here. Also ``cancelled`` for a registration this rank never saw: it is refused
            should it come.
    """

    kind: ClassVar[Kind] = "CANCEL_ACK"

    state: Literal["cancelled", "completed", "failed"]


class Alive(_Message, frozen=True):
    """ALIVE, prefill to decode: the request is getting on. Sent every few seconds until the WRITE is posted, and then.

    Attributes:
        key: the transfer.
        attempt: the try.
        stage: where it is. After ``posted`` nothing more is said until the end, so that a WRITE that does not move
            runs into the decode side's deadline.
    """

    kind: ClassVar[Kind] = "ALIVE"

    stage: Literal["prefilling", "ready", "posted"]


class Heartbeat(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """HB, decode to prefill: requests with these keys still wait; renew their leases.

    Attributes:
        keys: the transfers, whatever their attempts.
    """

    kind: ClassVar[Kind] = "HB"

    keys: Annotated[list[_Key], Meta(min_length=1, max_length=MAX_HEARTBEAT_KEYS)]


Message = Register | RegisterZero | Done | Failed | Cancel | CancelAck | Alive | Heartbeat

_TYPES: Final[dict[bytes, type[Message]]] = {
    b"R": Register,
    b"Z": RegisterZero,
    b"D": Done,
    b"F": Failed,
    b"C": Cancel,
    b"A": CancelAck,
    b"L": Alive,
    b"H": Heartbeat,
}
_DECODERS: Final = {letter: msgspec.msgpack.Decoder(cls) for letter, cls in _TYPES.items()}
_HEADERS: Final = {cls: PREFIX + bytes((WIRE_VERSION,)) + letter for letter, cls in _TYPES.items()}
_ENCODER: Final = msgspec.msgpack.Encoder()


def encode(message: Message) -> bytes:
    """The notification for a message, checked as the receiver will check it.

    Raises:
        WireError: a value is outside its limits; nothing is to be sent.
    """
    try:
        payload = _ENCODER.encode(message)
    except Exception as error:
        # Such as a text with lone surrogates, or an integer beyond 64 bits.
        raise WireError("invalid", message.kind, str(error)) from None
    data = _HEADERS[type(message)] + payload
    # msgspec checks limits when it decodes, not when an object is made.
    decode(data)
    return data


def decode(data: bytes) -> Message | None:
    """The message in a notification; None when the prefix says that it is not ours.

    Raises:
        WireError: it is ours and unusable. Nothing else is raised, whatever the bytes are.
    """
    if not data.startswith(PREFIX):
        return None
    header = data[len(PREFIX) : _HEADER_BYTES]
    if len(header) < 2:
        raise WireError("malformed", detail="cut off in the header")
    if header[0] != WIRE_VERSION:
        raise WireError("version", detail=f"version {header[0]}, expected {WIRE_VERSION}")
    letter = bytes(header[1:2])
    decoder = _DECODERS.get(letter)
    if decoder is None:
        raise WireError("kind", detail=f"kind {letter!r}")
    kind = _TYPES[letter].kind
    if len(data) > MAX_MESSAGE_BYTES:
        raise WireError("oversized", kind, f"{len(data)} bytes, at most {MAX_MESSAGE_BYTES}")
    try:
        return decoder.decode(memoryview(data)[_HEADER_BYTES:])
    except msgspec.ValidationError as error:
        raise WireError("invalid", kind, str(error)) from None
    except Exception as error:
        # DecodeError, UnicodeDecodeError, RecursionError: all mean bytes that no encoder of ours makes.
        raise WireError("malformed", kind, str(error)) from None


def clip(text: str) -> str:
    """A text for people, cut to what a message may carry, and without what UTF-8 cannot encode."""
    return _encodable(text)[:MAX_TEXT]


# vLLM appends "-" and the first 8 characters of a random hexadecimal number (vllm/v1/engine/input_processor.py).
_RANDOM_SUFFIX: Final = re.compile(r"-[0-9a-f]{8}\Z")


def transfer_key(request_id: str, kv_transfer_params: Mapping[str, Any] | None, *, randomized: bool) -> str:
    """What both sides and the router call a transfer; 1 to `MAX_KEY` characters.

    The router's ``transfer_id`` if it sets one, else vLLM's request id as the client sent it. Long keys are shortened
    to their beginning and a hash, in the same way on both sides.

    Args:
        request_id: vLLM's internal id of the request.
        kv_transfer_params: the request's parameters, if it has any.
        randomized: whether vLLM appends a random suffix to ids here, which is so unless
            ``VLLM_DISABLE_REQUEST_ID_RANDOMIZATION`` is set. If it is set, what looks like a suffix is part of the id.
    """
    given = (kv_transfer_params or {}).get("transfer_id")
    if isinstance(given, str) and given:
        key = given
    elif randomized:
        # Never nothing: an id that is a suffix alone stays as it is.
        key = _RANDOM_SUFFIX.sub("", request_id) or request_id
    else:
        key = request_id
    key = _encodable(key)
    if len(key) <= MAX_KEY:
        return key
    digest = hashlib.blake2b(key.encode(), digest_size=16).hexdigest()
    return f"{key[: MAX_KEY - len(digest) - 1]}~{digest}"


def token_hash(token_ids: Iterable[int]) -> bytes:
    """Eight bytes that tell two prompts apart: BLAKE2b over the ids as little-endian 64-bit integers."""
    packed = array("q", token_ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return hashlib.blake2b(packed, digest_size=TOKEN_HASH_BYTES).digest()


def _encodable(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode("utf-8")
