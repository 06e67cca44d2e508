"""Recordings: every snapshot of a watch in a file, to play an incident back.

JSON lines. The first says what the file is; each further one is a tick: ``{"snapshot": {...}, "events": [...]}``, with
the fields of :mod:`pdctl.watch.snapshot` by name, those that have their default left out. A name that ends in ``.gz``
is compressed. The last line may be cut off, as after a crash; anything else that is wrong is an error with its line.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import math
import os
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from functools import cache
from pathlib import Path
from types import TracebackType, UnionType
from typing import IO, Any, Final, Literal, Union, get_args, get_origin, get_type_hints

from pdctl import __version__
from pdctl.errors import PdctlError, UsageError
from pdctl.watch.alerts import AlertEvent
from pdctl.watch.snapshot import Snapshot

VERSION: Final = 1
LINE_LIMIT: Final = 32 * 2**20
"""Bytes of a line. A snapshot that needs more is recorded with fewer transfers; reading refuses longer lines."""
_MARK: Final = "pdctl_recording"
_ODD: Final = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


# Snapshots as JSON.


def snapshot_to_json(snapshot: Snapshot) -> dict[str, Any]:
    """Plain values, with the names of the fields. What has its default is left out."""
    encoded = _encode(snapshot)
    assert isinstance(encoded, dict)
    return encoded


def snapshot_from_json(data: object) -> Snapshot:
    """The snapshot again. Keys that this version does not know are ignored.

    Raises:
        ValueError: a field is missing or has a wrong type; its path is in the message.
    """
    snapshot = _decoder(Snapshot)(data, "snapshot")
    assert isinstance(snapshot, Snapshot)
    return snapshot


def _encode(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return {
            name: _encode(one)
            for name, default, make in _defaults(type(value))
            if not _is_default(one := getattr(value, name), default, make)
        }
    if isinstance(value, tuple):
        return [_encode(one) for one in value]
    if isinstance(value, Mapping):
        return {str(key): _encode(one) for key, one in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        # JSON has no such numbers, and null means that it is not known.
        return next(name for name, odd in _ODD.items() if odd == value or (odd != odd and value != value))
    return value


@cache
def _defaults(kind: type) -> tuple[tuple[str, Any, Any], ...]:
    return tuple((one.name, one.default, one.default_factory) for one in fields(kind))


def _is_default(value: Any, default: Any, make: Any) -> bool:
    if default is not MISSING:
        # 0 is not 0.0, nor False, for whoever reads the file.
        return type(value) is type(default) and bool(value == default)
    return make is not MISSING and value == make()


Decoder = Callable[[Any, str], Any]


@cache
def _decoder(kind: Any) -> Decoder:
    """What turns a value of JSON into ``kind``, or raises ValueError with the path."""
    origin, arguments = get_origin(kind), get_args(kind)
    if is_dataclass(kind):
        return _dataclass_decoder(kind)
    if origin in (Union, UnionType):
        inner = [_decoder(one) for one in arguments if one is not type(None)]
        assert len(inner) == 1
        return lambda value, path: None if value is None else inner[0](value, path)
    if origin is Literal:
        return _literal_decoder(arguments)
    if origin is tuple:
        return _tuple_decoder(_decoder(arguments[0]))
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return _mapping_decoder(_decoder(arguments[1]))
    return _plain_decoder(kind)


def _dataclass_decoder(kind: Any) -> Decoder:
    hints = get_type_hints(kind)
    decoders = {one.name: _decoder(hints[one.name]) for one in fields(kind)}
    required = [name for name, default, make in _defaults(kind) if default is MISSING and make is MISSING]

    def decode(value: Any, path: str) -> Any:
        if not isinstance(value, dict):
            raise ValueError(f"{path} is no object")
        missing = [name for name in required if name not in value]
        if missing:
            raise ValueError(f"{path}.{missing[0]} is missing")
        return kind(**{name: decoders[name](one, f"{path}.{name}") for name, one in value.items() if name in decoders})

    return decode


def _literal_decoder(allowed: tuple[Any, ...]) -> Decoder:
    def decode(value: Any, path: str) -> Any:
        if not isinstance(value, str) or value not in allowed:
            raise ValueError(f"{path} is none of {', '.join(map(str, allowed))}")
        return value

    return decode


def _tuple_decoder(inner: Decoder) -> Decoder:
    def decode(value: Any, path: str) -> Any:
        if not isinstance(value, list):
            raise ValueError(f"{path} is no list")
        return tuple(inner(one, f"{path}[{place}]") for place, one in enumerate(value))

    return decode


def _mapping_decoder(inner: Decoder) -> Decoder:
    def decode(value: Any, path: str) -> Any:
        if not isinstance(value, dict):
            raise ValueError(f"{path} is no object")
        return {key: inner(one, f"{path}.{key}") for key, one in value.items()}

    return decode


def _plain_decoder(kind: Any) -> Decoder:
    assert kind in (str, int, float, bool), kind

    def decode(value: Any, path: str) -> Any:
        if kind is float:
            if isinstance(value, str) and value in _ODD:
                return _ODD[value]
            if isinstance(value, int | float) and not isinstance(value, bool):
                with contextlib.suppress(OverflowError):
                    return float(value)
        elif isinstance(value, kind) and (kind is bool or not isinstance(value, bool)):
            return value
        raise ValueError(f"{path} is no {'text' if kind is str else 'number' if kind is not bool else 'true or false'}")

    return decode


# Writing.


class Recorder:
    """Writes a recording. What was written is on disk after each tick.

    Args:
        path: a new file, readable by its owner alone; compressed if its name ends in ``.gz``.

    Raises:
        UsageError: the file exists, or cannot be made.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError as error:
            raise UsageError(f"{path} exists", hint="a recording is never overwritten: choose another name") from error
        except OSError as error:
            raise UsageError(f"cannot write the recording {path}: {error.strerror or error}") from error
        self._raw = os.fdopen(handle, "wb")
        self._zip = gzip.GzipFile(fileobj=self._raw, mode="wb", compresslevel=5) if path.suffix == ".gz" else None
        self._write({_MARK: VERSION, "pdctl": __version__})

    def write(self, snapshot: Snapshot, events: Iterable[AlertEvent] = ()) -> None:
        """Add a tick.

        Raises:
            PdctlError: the disk is full, or the file is gone.
        """
        told = [{"kind": event.kind, "alert": event.alert.to_json()} for event in events]
        self._write({"snapshot": snapshot_to_json(snapshot), "events": told}, snapshot)

    def close(self) -> None:
        """End the file. Once is enough, twice does no harm."""
        try:
            if self._zip is not None:
                self._zip.close()
            self._raw.close()
        except OSError as error:
            raise self._failed(error) from error

    def __enter__(self) -> Recorder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _write(self, value: Mapping[str, Any], snapshot: Snapshot | None = None) -> None:
        line = _line(value)
        while len(line) > LINE_LIMIT and snapshot is not None and snapshot.transfers:
            kept = snapshot.transfers[: len(snapshot.transfers) // 2]
            lost = sum(one.in_flight for one in snapshot.transfers[len(kept) :])
            snapshot = replace(snapshot, transfers=kept, dropped=snapshot.dropped + lost)
            line = _line({**value, "snapshot": snapshot_to_json(snapshot)})
        if len(line) > LINE_LIMIT:
            line = _line({"left_out": f"a tick of {len(line)} bytes"})
        try:
            (self._zip or self._raw).write(line)
            if self._zip is not None:
                # What is written can be read, even if this process is killed now.
                self._zip.flush(zlib.Z_SYNC_FLUSH)
            self._raw.flush()
        except (OSError, ValueError) as error:
            raise self._failed(error) from error

    def _failed(self, error: Exception) -> PdctlError:
        return PdctlError(f"cannot write the recording {self.path}: {getattr(error, 'strerror', None) or error}")


def _line(value: Mapping[str, Any]) -> bytes:
    # Escaped, since half surrogates from other machines are no UTF-8.
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode("ascii") + b"\n"


# Reading.


@dataclass(frozen=True)
class Tick:
    """Where a tick is in a recording.

    Attributes:
        line: 1-based.
        at: of the snapshot.
        unix: of the snapshot.
        tick: its number.
    """

    line: int
    offset: int
    at: float
    unix: float
    tick: int


@dataclass(frozen=True)
class Recorded:
    """One tick: the snapshot, and the events as they were then, in their JSON form."""

    snapshot: Snapshot
    events: tuple[Mapping[str, Any], ...] = ()


def read_recording(path: Path) -> Iterator[Snapshot]:
    """Every snapshot of a recording, in order, in bounded memory.

    Raises:
        UsageError: it is no recording, of a later version, or damaged; with the line.
    """
    for recorded in read_ticks(path):
        yield recorded.snapshot


def read_ticks(path: Path) -> Iterator[Recorded]:
    """The same with the events.

    Raises:
        UsageError: as :func:`read_recording`.
    """
    with _opened(path) as source:
        for number, _, line in _lines(path, source):
            recorded = _parse(path, number, line)
            if recorded is not None:
                yield recorded


class Recording:
    """A recording with an index, for jumping about. A compressed one is unpacked into a temporary file first.

    Args:
        path: of the file.

    Raises:
        UsageError: as :func:`read_recording`; the whole file is checked.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        ticks: list[Tick] = []
        with contextlib.ExitStack() as stack:
            source = stack.enter_context(_opened(path))
            unpacked = None
            if path.suffix == ".gz":
                unpacked = stack.enter_context(tempfile.TemporaryFile(prefix="pdctl-recording-"))
            offset = 0
            for number, place, line in _lines(path, source):
                recorded = _parse(path, number, line)
                if recorded is not None:
                    one = recorded.snapshot
                    ticks.append(Tick(number, place if unpacked is None else offset, one.at, one.unix, one.tick))
                if unpacked is not None:
                    unpacked.write(line)
                    offset += len(line)
            self._file: IO[bytes] = unpacked if unpacked is not None else source
            self._stack = stack.pop_all()
        self.ticks: tuple[Tick, ...] = tuple(ticks)

    def __len__(self) -> int:
        return len(self.ticks)

    def read(self, index: int) -> Recorded:
        """The tick at a place of the index.

        Raises:
            IndexError: there is none.
            UsageError: the file has changed since.
        """
        tick = self.ticks[index]
        self._file.seek(tick.offset)
        recorded = _parse(self.path, tick.line, self._file.readline(LINE_LIMIT + 1))
        if recorded is None:
            raise _damaged(self.path, tick.line, "the file has changed while it was read")
        return recorded

    def find(self, at: float) -> int:
        """The place of the last tick not later than ``at``, in seconds of its snapshots' clock; 0 if all are later."""
        return max((place for place, tick in enumerate(self.ticks) if tick.at <= at), default=0)

    def find_tick(self, number: int) -> int:
        """The place of the last tick whose number is not above ``number``; 0 if all are."""
        return max((place for place, tick in enumerate(self.ticks) if tick.tick <= number), default=0)

    def close(self) -> None:
        """Let the file go."""
        self._stack.close()

    def __enter__(self) -> Recording:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _opened(path: Path) -> IO[bytes]:
    try:
        return gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb")  # type: ignore[return-value]
    except OSError as error:
        raise UsageError(f"cannot read the recording {path}: {error.strerror or error}") from error


def _lines(path: Path, source: IO[bytes]) -> Iterator[tuple[int, int, bytes]]:
    """Number, offset and bytes of every whole line but the first, which is checked."""
    number, offset = 0, 0
    while True:
        number += 1
        try:
            line = source.readline(LINE_LIMIT + 1)
        except EOFError:
            return
        except (OSError, zlib.error) as error:
            raise _damaged(path, number, str(error)) from error
        if len(line) > LINE_LIMIT:
            raise _damaged(path, number, f"longer than {LINE_LIMIT // 2**20} MiB")
        if not line.endswith(b"\n"):
            if number == 1:
                raise UsageError(f"{path} is no recording of pdctl watch")
            return
        if number == 1:
            _check_head(path, line)
        else:
            yield number, offset, line
        offset += len(line)


def _check_head(path: Path, line: bytes) -> None:
    try:
        version = json.loads(line)[_MARK]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise UsageError(f"{path} is no recording of pdctl watch (line 1 does not say that it is one)") from error
    if version != VERSION:
        raise UsageError(
            f"{path} is a recording of format {str(version)[:20]}, this pdctl reads format {VERSION}",
            hint="use the pdctl that made it",
        )


def _parse(path: Path, number: int, line: bytes) -> Recorded | None:
    """A tick; None for a line that is none."""
    try:
        value = json.loads(line)
        if not isinstance(value, dict):
            raise ValueError("no object")
        if "snapshot" not in value:
            return None
        events = value.get("events", [])
        if not isinstance(events, list) or not all(isinstance(one, dict) for one in events):
            raise ValueError("events is no list of objects")
        return Recorded(snapshot_from_json(value["snapshot"]), tuple(events))
    except (ValueError, RecursionError) as error:
        raise _damaged(path, number, str(error)[:200]) from error


def _damaged(path: Path, number: int, why: str) -> UsageError:
    return UsageError(f"{path}:{number}: damaged recording: {why}", hint="the ticks before that line can be read")
