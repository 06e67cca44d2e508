"""What is taken from the SSH configuration."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdctl.errors import UsageError
from pdctl.hosts import ssh_config
from pdctl.hosts.base import Login, SshSettings
from pdctl.hosts.ssh_config import Destination, SshConfig

Look = Callable[..., Destination]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("USER", "me")
    monkeypatch.setenv("LOGNAME", "me")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(ssh_config, "SYSTEM_FOLDER", str(tmp_path / "etc"))
    (tmp_path / ".ssh").mkdir()
    (tmp_path / "etc").mkdir()
    return tmp_path


@pytest.fixture
def look(home: Path) -> Look:
    """Look a name up in a user's configuration of the given text."""

    def destination(
        text: str, name: str = "box", *, login: Login | None = None, environ: dict[str, str] | None = None, **settings
    ) -> Destination:
        (home / ".ssh" / "config").write_text(text)
        config = SshConfig(SshSettings(**settings), environ=environ or {}, home=home)
        return config.destination(name, login or Login())

    return destination


def test_without_any_configuration(look: Look, home: Path) -> None:
    found = look("")
    hop = found.hop
    assert (hop.name, hop.address, hop.port, hop.user) == ("box", "box", 22, "me")
    assert (hop.identity_files, hop.identities_only, hop.identity_agent) == ((), False, None)
    assert found.route == (hop,)
    assert found.connect_timeout_s == 10
    assert hop.known_as.user_files == (f"{home}/.ssh/known_hosts", f"{home}/.ssh/known_hosts2")
    assert hop.known_as.global_files == (f"{home}/etc/ssh_known_hosts", f"{home}/etc/ssh_known_hosts2")


def test_what_a_host_entry_says(look: Look, home: Path) -> None:
    text = """
        Host other
          User nobody
        Host b?x
          HostName %h.example.org
          Port 2222
          User = worker
          IdentityFile ~/keys/%r@%h
          IdentityFile /second
          IdentitiesOnly yes
          UserKnownHostsFile ~/a "%d/b c" /x/${NAME}/%h
          GlobalKnownHostsFile none
          HostKeyAlias The-Box
          HashKnownHosts yes
          ConnectTimeout 7
          AddressFamily inet6
          ForwardAgent yes
          StrictHostKeyChecking no
    """
    found = look(text, environ={"NAME": "value"})
    hop = found.hop
    assert (hop.address, hop.port, hop.user) == ("box.example.org", 2222, "worker")
    assert hop.identity_files == (f"{home}/keys/worker@box.example.org", "/second")
    assert hop.identities_only
    assert hop.family == "inet6"
    assert found.connect_timeout_s == 7
    assert hop.known_as.recorded_name == "the-box"
    assert hop.known_as.user_files == (f"{home}/a", f"{home}/b c", "/x/value/box.example.org")
    assert hop.known_as.global_files == ()
    assert hop.known_as.hashed


def test_the_cluster_file_wins(look: Look, home: Path) -> None:
    text = "Host *\nUser configured\nPort 1\nConnectTimeout 7\nIdentityFile /configured\n"
    found = look(text, user="given", port=2, identity_file="~/given", connect_timeout_s=3.5)
    assert (found.hop.user, found.hop.port, found.connect_timeout_s) == ("given", 2, 3.5)
    assert found.hop.identity_files == (f"{home}/given", "/configured")


def test_a_host_wins_over_the_cluster_file(look: Look) -> None:
    hop = look("", user="given", port=2, login=Login(user="own", port=3)).hop
    assert (hop.user, hop.port) == ("own", 3)


def test_what_is_given_counts_for_match_and_tokens(look: Look) -> None:
    text = "Match user given\nIdentityFile /%r\nHost box\nProxyCommand relay %h %p %r\n"
    hop = look(text, user="given", port=2).hop
    assert hop.identity_files == ("/given",)
    assert hop.proxy_command == "relay box 2 given"


def test_the_system_configuration_comes_second(look: Look, home: Path) -> None:
    (home / "etc" / "ssh_config").write_text("Include conf.d/*.conf\nUser system\nPort 99\n")
    (home / "etc" / "conf.d").mkdir()
    (home / "etc" / "conf.d" / "a.conf").write_text("HashKnownHosts yes\n")
    # The last entry of the user's file must not swallow the system's.
    hop = look("Host other\nUser mine\n").hop
    assert (hop.user, hop.port, hop.known_as.hashed) == ("system", 99, True)
    assert look("User mine\nHost other\nPort 5").hop.user == "mine"


class TestChoiceOfFile:
    def test_a_given_file_replaces_all_others(self, look: Look, home: Path) -> None:
        (home / "etc" / "ssh_config").write_text("User system\n")
        (home / "given").write_text("Port 5\n")
        hop = look("User mine", config_file=f"{home}/given").hop
        assert (hop.user, hop.port) == ("me", 5)

    def test_the_environment_wins_over_the_cluster_file(self, look: Look, home: Path) -> None:
        (home / "given").write_text("Port 5\n")
        (home / "from_environment").write_text("Port 6\n")
        environ = {ssh_config.CONFIG_VARIABLE: "~/from_environment"}
        assert look("", config_file=f"{home}/given", environ=environ).hop.port == 6

    def test_a_missing_file(self, look: Look) -> None:
        with pytest.raises(UsageError, match="/no/such does not exist") as caught:
            look("", config_file="/no/such")
        assert "ssh.config_file" in caught.value.hint
        with pytest.raises(UsageError) as caught:
            look("", environ={ssh_config.CONFIG_VARIABLE: "/no/such"})
        assert ssh_config.CONFIG_VARIABLE in caught.value.hint


class TestInclude:
    def test_relative_absolute_and_missing(self, look: Look, home: Path) -> None:
        (home / ".ssh" / "one").write_text("Host box\nUser one\n")
        (home / "two").write_text("Port 2\n")
        hop = look("Include one no-such ~/tw*\nHost box\nIdentityFile /three\n").hop
        assert (hop.user, hop.port, hop.identity_files) == ("one", 2, ("/three",))

    def test_lines_after_it_belong_to_where_it_stands(self, look: Look, home: Path) -> None:
        (home / ".ssh" / "one").write_text("Host other\nUser one\n")
        assert look("Include one\nPort 5\n").hop.port == 5
        assert look("Host box\nInclude one\nPort 5\n").hop.port == 5
        assert look("Host nobox\nInclude one\nPort 5\n").hop.port == 22

    @pytest.mark.parametrize("outer", ["Host box", "Host x box !y", "Match originalhost box", "Match host box user me"])
    def test_inside_an_entry_it_holds_for_that_entry_alone(self, look: Look, home: Path, outer: str) -> None:
        (home / ".ssh" / "one").write_text("HostKeyAlias plain\nHost b* c*\nPort 5\nMatch all\nIdentityFile /all\n")
        text = f"{outer}\nInclude one\n"
        hop = look(text).hop
        assert (hop.known_as.name, hop.port, hop.identity_files) == ("plain", 5, ("/all",))
        hop = look(text, "bus").hop
        assert (hop.known_as.name, hop.port, hop.identity_files) == ("bus", 22, ())

    def test_nested_too_deep(self, look: Look, home: Path) -> None:
        with pytest.raises(UsageError, match="nested more than"):
            look("Include config\n")


@pytest.mark.parametrize("criteria", ["tagged x", "localnetwork 10.0.0.0/8", "originalhost box tagged x"])
def test_criteria_that_are_not_known_do_not_hold(look: Look, criteria: str) -> None:
    assert look(f"Match {criteria}\nPort 5\nInclude no-such\nPort 6\nMatch all\nUser all\n").hop.port == 22
    assert look(f"Match {criteria}\nPort 5\nHost *\nUser all\n").hop.user == "all"


@pytest.mark.parametrize("text", ["Host 'unclosed", "Port", "Match host", "UserKnownHostsFile 'a"])
def test_lines_that_cannot_be_read(look: Look, home: Path, text: str) -> None:
    with pytest.raises(UsageError, match=rf"{home}/\.ssh/config:2: this line"):
        look(f"\n{text}\n")


@pytest.mark.parametrize("port", ["0", "65536", "ssh", "-1"])
def test_a_port_that_is_none(look: Look, port: str) -> None:
    with pytest.raises(UsageError, match="port"):
        look(f"Port {port}\n")


@given(text=st.text(st.sampled_from("Hhostprxymachinlude*!? \t\n=\"'%~#$,{}@:[]0")))
def test_any_text_is_read_or_explained(text: str) -> None:
    folder = Path("/no/such/home")
    expander = ssh_config._Expander(folder, folder)
    file = type("File", (), {"read_text": lambda *_, **__: text, "__str__": lambda _: "config"})()
    try:
        lines = list(expander._lines(file, "", 0))
        ssh_config.SSHConfig.from_text("\n".join(lines)).lookup("box")
    except (UsageError, ssh_config.ConfigParseError, ValueError):
        pass


class TestJumpHosts:
    def path(self, destination: Destination) -> list[tuple[str, str, int]]:
        return [(hop.user, hop.address, hop.port) for hop in destination.route]

    def test_none(self, look: Look) -> None:
        assert len(look("ProxyJump none\n").route) == 1
        assert len(look("Host box\nProxyJump none\nHost *\nProxyJump jump\n").route) == 1

    def test_one_with_an_entry_of_its_own(self, look: Look) -> None:
        text = "Host box\nProxyJump jump\nHost jump\nHostName j.example.org\nPort 5\nUser jumper\nHostKeyAlias j\n"
        found = look(text, user="given", port=2)
        # What the cluster file gives is for the host.
        assert self.path(found) == [("jumper", "j.example.org", 5), ("given", "box", 2)]
        assert found.route[0].known_as.name == "j"

    @pytest.mark.parametrize(
        ("jump", "expected"),
        [
            ("jump", ("me", "jump", 22)),
            ("you@jump:5", ("you", "jump", 5)),
            ("ssh://you@jump:5", ("you", "jump", 5)),
            ("[fe80::1]:5", ("me", "fe80::1", 5)),
            ("you@[fe80::1]", ("you", "fe80::1", 22)),
        ],
    )
    def test_forms(self, look: Look, jump: str, expected: tuple[str, str, int]) -> None:
        assert self.path(look(f"Host box\nProxyJump {jump}\n"))[0] == expected

    def test_a_chain_in_order(self, look: Look) -> None:
        text = "Host box\nProxyJump a,b,c\nHost a\nProxyJump z\nHost b\nProxyJump never\n"
        assert [hop.name for hop in look(text).route] == ["z", "a", "b", "c", "box"]

    def test_an_entry_for_all_hosts_does_not_hold_for_the_jump_host(self, look: Look) -> None:
        assert [hop.name for hop in look("Host *\nProxyJump jump\n").route] == ["jump", "box"]

    def test_a_circle(self, look: Look) -> None:
        with pytest.raises(UsageError, match="circle"):
            look("Host box\nProxyJump a\nHost a\nProxyJump b\nHost b\nProxyJump a\n")

    def test_one_that_cannot_be_read(self, look: Look) -> None:
        with pytest.raises(UsageError, match="ProxyJump that cannot be read: 'a:b:c'"):
            look("ProxyJump a:b:c\n")

    def test_the_first_of_jump_and_command_counts(self, look: Look) -> None:
        assert look("ProxyCommand relay\nProxyJump jump\n").hop.proxy_command == "relay"
        found = look("ProxyJump jump\nProxyCommand relay\nHost jump\nUser x\n")
        assert [hop.name for hop in found.route] == ["jump", "box"]
        assert found.hop.proxy_command is None
        assert len(look("ProxyCommand none\nProxyJump jump\n").route) == 1


class TestAgent:
    @pytest.mark.parametrize(
        ("line", "expected"),
        [
            ("", "/agent"),
            ("IdentityAgent SSH_AUTH_SOCK", "/agent"),
            ("IdentityAgent none", None),
            ("IdentityAgent $OTHER", "/other"),
            ("IdentityAgent ${OTHER}/x", "/other/x"),
            ("IdentityAgent /path/%r", "/path/me"),
        ],
    )
    def test_which(self, look: Look, line: str, expected: str | None) -> None:
        environ = {"SSH_AUTH_SOCK": "/agent", "OTHER": "/other"}
        assert look(line + "\n", environ=environ).hop.identity_agent == expected
