"""What the probe reads from UCX's log, from counters, and from its own memory map."""

from __future__ import annotations

from pathlib import Path

from pdctl_connector.probe_evidence import LOG_LINES, Log, loaded_libraries, read_counters, silence

# As UCX 1.23 writes it with UCX_LOG_LEVEL=info and UCX_PROTO_INFO=y; tables of other operations left in.
UCX_LOG = """\
I1129 20:07:00.611830     115 nixl_log.cpp:80] NIXL version: 1.5.1 (git: 1d2a52eb)
I1129 20:07:00.624602     115 nixl_plugin_manager.cpp:623] Discovered backend plugin: OBJ
[1795981402.549726] [d1:17227:0]      ucp_worker.c:1997 UCX  INFO    w self cfg#0 rma_am(tcp/lo)  amo_am(tcp/lo)
[1795981402.555256] [d1:17227:0]   +--------+-------------+-----------------------------------+
[1795981402.555256] [d1:17227:0]   | w self cfg#0                                             |
[1795981402.555256] [d1:17227:0]   | remote memory write by ucp_put* from host memory to host |
[1795981402.555256] [d1:17227:0]   +--------+-------------+-----------------------------------+
[1795981402.555256] [d1:17227:0]   | Range  | Description |              Config               |
[1795981402.555256] [d1:17227:0]   +--------+-------------+-----------------------------------+
[1795981402.555256] [d1:17227:0]   | 0..inf | zero-copy   | 52% on tcp/lo and 48% on tcp/eth0 |
[1795981402.555256] [d1:17227:0]   +--------+-------------+-----------------------------------+
[1795981402.599086] [d1:17227:0]   +------------+--------------------+---------------+
[1795981402.599086] [d1:17227:0]   | w inter-node cfg#1                              |
[1795981402.599086] [d1:17227:0]   | active message by ucp_am_send* from host memory |
[1795981402.599086] [d1:17227:0]   +------------+--------------------+---------------+
[1795981402.599086] [d1:17227:0]   |   Range    |    Description     |    Config     |
[1795981402.599086] [d1:17227:0]   +------------+--------------------+---------------+
[1795981402.599086] [d1:17227:0]   |          0 | short              | tcp/lo        |
[1795981402.599086] [d1:17227:0]   +------------+--------------------+---------------+
[1795981402.600000] [d1:17227:0]   +-----------+-------------+---------------------------------------+
[1795981402.600000] [d1:17227:0]   | w inter-node cfg#1                                            |
[1795981402.600000] [d1:17227:0]   | remote memory write by ucp_put*(multi) from host memory to host |
[1795981402.600000] [d1:17227:0]   +-----------+-------------+---------------------------------------+
[1795981402.600000] [d1:17227:0]   |   Range   | Description |                Config                 |
[1795981402.600000] [d1:17227:0]   +-----------+-------------+---------------------------------------+
[1795981402.600000] [d1:17227:0]   |   0..1024 | short       | rc_mlx5/mlx5_0:1                      |
[1795981402.600000] [d1:17227:0]   | 1025..inf | zero-copy   | 60% on rc_mlx5/mlx5_0:1 and 40% on rc_x/m:1 |
[1795981402.600000] [d1:17227:0]   +-----------+-------------+---------------------------------------+
[1795981404.346942] [d1:17227:0]          tcp_ep.c:1260 UCX  DIAG  tcp_ep 0x55ef89f858d0: send(25) failed
"""


def fed(text: str) -> Log:
    log = Log()
    for line in text.splitlines(keepends=True):
        log.feed(line)
    return log


class TestLog:
    def test_the_ways_of_remote_writes(self) -> None:
        assert fed(UCX_LOG).lanes == [
            "self: rma_am(tcp/lo) amo_am(tcp/lo)",
            "self write 0..inf: zero-copy, 52% on tcp/lo and 48% on tcp/eth0",
            "inter-node write 0..1024: short, rc_mlx5/mlx5_0:1",
            "inter-node write 1025..inf: zero-copy, 60% on rc_mlx5/mlx5_0:1 and 40% on rc_x/m:1",
        ]

    def test_the_log_is_kept_without_tables_and_noise(self) -> None:
        lines = fed(UCX_LOG).tail()
        assert len(lines) == 2
        assert "NIXL version" in lines[0]
        assert "tcp_ep" in lines[1]

    def test_it_says_the_same_only_once(self) -> None:
        assert fed(UCX_LOG * 3).lanes == fed(UCX_LOG).lanes

    def test_it_stays_small_and_keeps_start_and_end(self) -> None:
        log = fed("".join(f"line {number}\n" for number in range(5000)))
        assert log.lines[0] == "line 0"
        assert log.tail()[-1] == "line 4999"
        assert len(log.tail()) == LOG_LINES
        assert len(log.lines) <= 2 * LOG_LINES

    def test_anything_may_come(self) -> None:
        log = fed("\n\x00\n[1.1] [a] \n[1.1] [a] |\n[1.1] [a] | | | |\n" + "x" * 100_000 + "\n|a|b|c|\n")
        assert log.lanes == []
        assert max(map(len, log.lines)) == 400


def test_counters_of_interfaces_and_devices(tmp_path: Path) -> None:
    (tmp_path / "proc/net").mkdir(parents=True)
    (tmp_path / "proc/net/dev").write_text(
        "Inter-|   Receive                                                |  Transmit\n"
        " face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs drop\n"
        "    lo: 100 1 0 0 0 0 0 0 100 1 0 0 0 0 0 0\n"
        "  eth0:2000 1 0 0 0 0 0 0 3000 1 0 0 0 0 0 0\n"
    )
    devices = tmp_path / "infiniband"
    for path, value in (
        ("rdmap0s6/ports/1/hw_counters/rdma_write_bytes", "40"),
        ("rdmap0s6/ports/1/hw_counters/lifespan", "12"),
        ("mlx5_0/ports/1/counters/port_xmit_data", "7"),
        ("mlx5_0/ports/2/counters/port_xmit_data", "8"),
        ("old0/hw_counters/tx_bytes", "5"),
        ("bad0/hw_counters/rx_bytes", "N/A (no PMA)"),
    ):
        (devices / path).parent.mkdir(parents=True, exist_ok=True)
        (devices / path).write_text(value + "\n")
    assert read_counters(tmp_path / "proc", devices) == {
        "net:lo:rx": 100,
        "net:lo:tx": 100,
        "net:eth0:rx": 2000,
        "net:eth0:tx": 3000,
        "rdma:rdmap0s6:rdma_write_bytes": 40,
        "rdma:mlx5_0:port_xmit_data": 15,
        "rdma:old0:tx_bytes": 5,
    }
    assert read_counters(tmp_path / "nowhere", tmp_path / "neither") == {}
    assert any(name.startswith("net:") for name in read_counters())


def test_libraries_in_use(tmp_path: Path) -> None:
    maps = tmp_path / "maps"
    maps.write_text(
        "7f00-7f01 r-xp 0 08:01 1 /opt/amazon/efa/lib/libfabric.so.1.2.3\n"
        "7f00-7f01 r-xp 0 08:01 1 /opt/amazon/efa/lib/libfabric.so.1.2.3\n"
        "7f00-7f01 r-xp 0 08:01 1 /venv/lib/plugins/libplugin_LIBFABRIC.so\n"
        "7f00-7f01 r-xp 0 08:01 1 /venv/lib/ucx/libuct_ib-abc.so.0\n"
        "7f00-7f01 r-xp 0 08:01 1 /usr/lib/libc.so.6\n"
        "7f00-7f01 rw-p 0 00:00 0 [heap]\n"
    )
    assert loaded_libraries(maps) == [
        "/opt/amazon/efa/lib/libfabric.so.1.2.3",
        "/venv/lib/plugins/libplugin_LIBFABRIC.so",
        "/venv/lib/ucx/libuct_ib-abc.so.0",
    ]


def test_silence_is_explained_by_the_way_that_was_used() -> None:
    assert "free TCP ports" in silence("d1", ["UCX"], 15)
    assert "security groups" in silence("d1", ["LIBFABRIC"], 15)
    assert silence("d1", ["OTHER"], 1.5) == "NIXL got no answer from d1 within 1.5 s"
