"""Recordings: what is written comes back; what is damaged is told with its line."""

from __future__ import annotations

import gzip
import json
import math
import os
import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from replay_cases import CASES, instance, record, snapshot, transfer
from test_rules import SNAPSHOTS

from pdctl import errors
from pdctl.errors import UsageError
from pdctl.watch import recording
from pdctl.watch.book import Watchdog
from pdctl.watch.recording import Recorder, Recording, read_recording, read_ticks, snapshot_from_json, snapshot_to_json
from pdctl.watch.settings import WatchSettings
from pdctl.watch.snapshot import Percentiles, Snapshot

FORMS = pytest.mark.parametrize("name", ["one.jsonl", "one.jsonl.gz"])


def ticks(count: int) -> list[Snapshot]:
    one = transfer("key", record("prefill-0", "posted", 9.0), record("decode-0", "registered", 9.0))
    return [snapshot(tick, [one], ttft=Percentiles(0.1, 0.5, 3)) for tick in range(count)]


def write(path: Path, snapshots: list[Snapshot]) -> Path:
    with Recorder(path) as recorder:
        for one in snapshots:
            recorder.write(one)
    return path


class TestValues:
    @settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(SNAPSHOTS)
    @example(replace(snapshot(1), poll_s=-0.0))
    @example(replace(snapshot(1), poll_s=math.nan))
    def test_whatever_is_written_comes_back(self, one: Snapshot) -> None:
        again = snapshot_from_json(json.loads(json.dumps(snapshot_to_json(one), allow_nan=False)))
        # NaN is not equal to itself, but looks the same; -0.0 is equal to the default 0.0, but looks different.
        assert re.sub(r"-0\.0\b", "0.0", repr(again)) == re.sub(r"-0\.0\b", "0.0", repr(one))

    def test_defaults_are_left_out_and_none_stays_none(self) -> None:
        data = snapshot_to_json(snapshot(1, changed=[instance("decode-0", kv_use=None, requests_waiting=0)]))
        decode = data["instances"][1]
        assert "kv_use" not in decode
        assert decode["requests_waiting"] == 0
        assert "ttft" not in data

    def test_what_a_later_version_adds_is_ignored(self) -> None:
        data = snapshot_to_json(snapshot(1))
        data["colour"] = "red"
        data["instances"][0]["mood"] = 3
        assert snapshot_from_json(data) == snapshot(1)

    @pytest.mark.parametrize(
        ("path", "value", "said"),
        [
            (("at",), "late", "snapshot.at is no number"),
            (("at",), True, "snapshot.at is no number"),
            (("at",), 10**400, "snapshot.at is no number"),
            (("tick",), 1.5, "snapshot.tick is no number"),
            (("hosts",), {}, "snapshot.hosts is no list"),
            (("instances", 0, "name"), None, "snapshot.instances[0].name is no text"),
            (("instances", 0, "process"), "fine", "snapshot.instances[0].process is none of running"),
            (("instances", 0, "healthy"), 1, "snapshot.instances[0].healthy is no true or false"),
            (("instances", 0, "ranks"), [3], "snapshot.instances[0].ranks[0] is no object"),
            (("stage_p99_s",), {"a": "b"}, "snapshot.stage_p99_s.a is no number"),
        ],
    )
    def test_wrong_types_are_told_with_their_path(self, path: tuple[object, ...], value: object, said: str) -> None:
        data = snapshot_to_json(snapshot(1))
        place = data
        for step in path[:-1]:
            place = place[step]  # type: ignore[index]
        place[path[-1]] = value  # type: ignore[index]
        with pytest.raises(ValueError, match=said.replace("[", r"\[").replace("]", r"\]")):
            snapshot_from_json(data)

    def test_missing_fields_are_told(self) -> None:
        data = snapshot_to_json(snapshot(1))
        del data["unix"]
        with pytest.raises(ValueError, match=r"snapshot\.unix is missing"):
            snapshot_from_json(data)

    def test_infinity(self) -> None:
        one = replace(snapshot(1), request_rate=math.inf, poll_s=-math.inf)
        assert snapshot_from_json(json.loads(json.dumps(snapshot_to_json(one), allow_nan=False))) == one


class TestFiles:
    @FORMS
    def test_round_trip_with_events(self, tmp_path: Path, name: str) -> None:
        watchdog = Watchdog(WatchSettings())
        with Recorder(tmp_path / name) as recorder:
            for one in ticks(3):
                recorder.write(one, watchdog.look(one)[1])
        read = list(read_ticks(tmp_path / name))
        assert [one.snapshot for one in read] == ticks(3) == list(read_recording(tmp_path / name))
        assert [[event["kind"] for event in one.events] for one in read] == [[], ["opened"], []]
        assert read[1].events[0]["alert"]["code"] == "T002"
        assert (tmp_path / name).stat().st_mode & 0o777 == 0o600

    @FORMS
    def test_what_was_written_can_be_read_before_the_end(self, tmp_path: Path, name: str) -> None:
        recorder = Recorder(tmp_path / name)
        for one in ticks(4):
            recorder.write(one)
        assert list(read_recording(tmp_path / name)) == ticks(4)
        recorder.close()
        recorder.close()

    @FORMS
    def test_a_cut_last_line_is_left_out(self, tmp_path: Path, name: str) -> None:
        path = write(tmp_path / name, ticks(5))
        whole = path.read_bytes()
        counts = []
        for cut in range(len(whole) - 1, len(whole) // 2, -max(len(whole) // 40, 1)):
            path.write_bytes(whole[:cut])
            read = list(read_recording(path))
            assert read == ticks(5)[: len(read)]
            counts.append(len(read))
        assert counts[0] >= 4 > counts[-1]

    def test_no_file_is_overwritten(self, tmp_path: Path) -> None:
        path = write(tmp_path / "one.jsonl", ticks(1))
        with pytest.raises(UsageError, match="exists"):
            Recorder(path)
        assert list(read_recording(path)) == ticks(1)

    def test_a_folder_that_is_not_there(self, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match="cannot write the recording"):
            Recorder(tmp_path / "no" / "one.jsonl")
        with pytest.raises(UsageError, match="cannot read the recording"):
            list(read_recording(tmp_path / "no.jsonl"))

    @pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")  # noqa: PTH110
    def test_a_full_disk_is_one_sentence(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        recorder = Recorder(tmp_path / "one.jsonl")
        with open("/dev/full", "wb") as full:  # noqa: PTH123
            monkeypatch.setattr(recorder, "_raw", full)
            with pytest.raises(errors.PdctlError, match="No space left on device"):
                recorder.write(ticks(1)[0])
            monkeypatch.undo()
            recorder.close()
            with pytest.raises(OSError, match="No space"):
                full.close()

    def test_other_files(self, tmp_path: Path) -> None:
        path = tmp_path / "one.jsonl"
        for content in (b"", b"hello\n", b"[1]\n", b"{}\n", b'{"pdctl_recording"', b"\xff\xfe\n"):
            path.write_bytes(content)
            with pytest.raises(UsageError, match="no recording of pdctl watch"):
                list(read_recording(path))

    def test_another_format(self, tmp_path: Path) -> None:
        (tmp_path / "one.jsonl").write_text('{"pdctl_recording": 2}\n')
        with pytest.raises(UsageError, match="format 2, this pdctl reads format 1"):
            list(read_recording(tmp_path / "one.jsonl"))

    @pytest.mark.parametrize("bad", ["nonsense", "[]", '{"snapshot": 3}', '{"snapshot": {"at": 1}}', "[" * 100_000])
    def test_a_damaged_line_has_its_number(self, tmp_path: Path, bad: str) -> None:
        path = write(tmp_path / "one.jsonl", ticks(2))
        with path.open("a") as file:
            file.write(f"{bad}\n")
        source = read_recording(path)
        assert [next(source), next(source)] == ticks(2)
        with pytest.raises(UsageError, match=r"one\.jsonl:4: damaged"):
            next(source)

    def test_a_damaged_archive(self, tmp_path: Path) -> None:
        path = write(tmp_path / "one.jsonl.gz", ticks(30))
        data = bytearray(path.read_bytes())
        data[len(data) // 2 : len(data) // 2 + 40] = b"\0" * 40
        path.write_bytes(bytes(data))
        with pytest.raises(UsageError, match="damaged"):
            list(read_recording(path))
        path.write_bytes(b"not gzip at all\n")
        with pytest.raises(UsageError, match="damaged"):
            list(read_recording(path))


class TestBounds:
    def test_a_large_snapshot_loses_transfers_not_the_tick(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(recording, "LINE_LIMIT", 20_000)
        many = [transfer(f"key-{n}", record("prefill-0", "posted", 9.0)) for n in range(300)]
        [read] = read_recording(write(tmp_path / "one.jsonl", [snapshot(0, many)]))
        assert 0 < len(read.transfers) < 300
        assert read.dropped == 300 - len(read.transfers)
        assert read.transfers[0].key == "key-0"

    def test_a_line_that_cannot_be_made_small_is_left_out(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(recording, "LINE_LIMIT", 200)
        assert list(read_recording(write(tmp_path / "one.jsonl", ticks(2)))) == []

    def test_a_long_line_is_not_read(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        path = write(tmp_path / "one.jsonl", ticks(2))
        monkeypatch.setattr(recording, "LINE_LIMIT", 200)
        with pytest.raises(UsageError, match=r"one\.jsonl:2: damaged recording: longer than"):
            list(read_recording(path))

    def test_an_archive_of_zeros(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(recording, "LINE_LIMIT", 1 << 20)
        path = tmp_path / "one.jsonl.gz"
        with gzip.open(path, "wb") as file:
            file.write(b'{"pdctl_recording": 1}\n' + b"0" * (8 << 20))
        with pytest.raises(UsageError, match="longer than 1 MiB"):
            list(read_recording(path))


class TestIndex:
    @FORMS
    def test_jumping_about(self, tmp_path: Path, name: str) -> None:
        path = write(tmp_path / name, ticks(20))
        with Recording(path) as played:
            assert len(played) == 20
            for place in (19, 0, 7, 7, 18):
                assert played.read(place).snapshot == ticks(20)[place]
            assert [played.find(at) for at in (0.0, 100.0, 104.9, 105.0, 1e9)] == [0, 0, 4, 5, 19]
            assert [played.find_tick(number) for number in (-1, 3, 99)] == [0, 3, 19]
            assert [tick.line for tick in played.ticks][:3] == [2, 3, 4]
            with pytest.raises(IndexError):
                played.read(20)

    def test_a_file_that_changed(self, tmp_path: Path) -> None:
        path = write(tmp_path / "one.jsonl", ticks(3))
        with Recording(path) as played:
            path.write_bytes(b"x\n" * 3)
            with pytest.raises(UsageError, match="damaged"):
                played.read(1)

    def test_an_empty_recording(self, tmp_path: Path) -> None:
        with Recording(write(tmp_path / "one.jsonl", [])) as played:
            assert (len(played), played.find(5.0), played.find_tick(5)) == (0, 0, 0)


def test_all_replays_survive_recording(tmp_path: Path) -> None:
    case = next(one for one in CASES if one.name == "E003-host-unreachable")
    path = write(tmp_path / "one.jsonl", case.snapshots())
    assert list(read_recording(path)) == case.snapshots()
