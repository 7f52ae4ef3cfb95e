"""Settings: flag over environment over file over default; clear errors; nothing secret shown."""

from pathlib import Path

import pytest

from guard.errors import ConfigError
from guard.semconv import DEFAULT_PORT
from guard.settings import Settings, default_state_dir, is_loopback, load


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for key in ("HOST", "PORT", "CONFIG", "STATE_DIR", "LOG_LEVEL"):
        monkeypatch.delenv(f"KVGUARD_SERVE_{key}", raising=False)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "kvguard.toml"
    path.write_text('port = 1111\nlog_level = "debug"\nmax_engines = 7\n')
    return path


def test_defaults() -> None:
    settings = load().settings
    assert (settings.host, settings.port, settings.tokens_file) == ("127.0.0.1", DEFAULT_PORT, None)
    assert settings.loopback


def test_flag_beats_environment_beats_file_beats_default(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVGUARD_SERVE_PORT", "2222")
    monkeypatch.setenv("KVGUARD_SERVE_LOG_LEVEL", "error")
    loaded = load({"port": 3333, "host": None}, file)
    assert (loaded.settings.port, loaded.settings.log_level, loaded.settings.max_engines) == (3333, "error", 7)
    assert {key: loaded.sources[key] for key in ("port", "log_level", "max_engines", "host")} == {
        "port": "flag", "log_level": "environment", "max_engines": "file", "host": "default",
    }  # fmt: skip


def test_the_file_can_be_named_by_the_environment(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVGUARD_SERVE_CONFIG", str(file))
    assert load().settings.port == 1111


def test_what_kubernetes_makes_up_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVGUARD_PORT", "tcp://10.0.0.1:9")
    monkeypatch.setenv("KVGUARD_HOST", "0.0.0.0")
    monkeypatch.setenv("KVGUARD_SERVE_SERVICE_HOST", "10.0.0.1")
    monkeypatch.setenv("KVGUARD_SERVE_PORT_9_TCP", "tcp://10.0.0.1:9")
    assert load().settings.port == DEFAULT_PORT
    monkeypatch.setenv("KVGUARD_SERVE_PORT", "tcp://10.0.0.1:9")
    with pytest.raises(ConfigError, match=r"port: .*KVGUARD_SERVE_PORT.*enableServiceLinks: false"):
        load()


@pytest.mark.parametrize(
    ("content", "key", "message"),
    [
        ("prot = 1", "prot", "unknown key in .*kvguard.toml; known are host, port"),
        ("[serve]\nport = 1", "serve", "unknown key"),
        ("port = 70000", "port", "less than or equal to 65535.*file .*kvguard.toml"),
        ('max_body_bytes = "lots"', "max_body_bytes", "integer"),
        ("forward_ratio = 1.5", "forward_ratio", "less than or equal to 1"),
        ('forward_endpoint = "collector:4318"', "forward_endpoint", "not a URL"),
        ('log_level = "loud"', "log_level", "'debug'"),
        ('state_dir = ""', "state_dir", "names no directory.*file .*kvguard.toml"),
        ('history_dir = ""', "history_dir", "names no directory"),
        ("port = ", "config", "not TOML"),
    ],
)
def test_errors_name_the_key_and_the_place(tmp_path: Path, content: str, key: str, message: str) -> None:
    path = tmp_path / "kvguard.toml"
    path.write_text(content)
    with pytest.raises(ConfigError, match=message) as caught:
        load({}, path)
    assert caught.value.key == key


@pytest.mark.parametrize(
    ("entry", "instead"),
    [
        ("name:8420", "write 'name', which holds for every port"),
        ("https://Name.example/v1", "write 'name.example'"),
        ("name.example.", "write 'name.example'"),
        (" name ", "write 'name'"),
        ("[fd00::1]", "write 'fd00::1'"),
        ("[fd00::1]:8420", "write 'fd00::1'"),
        ("fd00:0:0::1", "write 'fd00::1'"),
        ("bücher.example", "write 'xn--bcher-kva.example'"),
        ("*", "no patterns, so name each host"),
        ("*.example", "no patterns, so name each host"),
        ("", "write a name such as 'kvguard.internal'"),
        (".", "write a name such as"),
        ("[", "write a name such as"),
        ("a..b", "write a name such as"),
    ],
)
def test_a_host_that_no_request_can_name_stops_the_start_and_says_what_to_write(
    entry: str, instead: str, tmp_path: Path
) -> None:
    path = tmp_path / "kvguard.toml"
    path.write_text(f'allowed_hosts = ["kvguard.internal", "{entry}"]', "utf-8")
    with pytest.raises(ConfigError) as caught:
        load({}, path)
    assert caught.value.key == "allowed_hosts"
    assert f"{entry!r} would match no request: " in str(caught.value)
    assert instead in str(caught.value)


@pytest.mark.parametrize("name", ["kvguard", "KVguard.internal", "kv_guard-1", "10.0.0.7", "fd00::1", "FD00::1"])
def test_a_host_that_a_request_can_name_is_taken(name: str) -> None:
    assert load({"allowed_hosts": (name,)}).settings.allowed_hosts == (name,)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        load({}, tmp_path / "none.toml")


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.1", "kvguard.example"])
def test_a_bind_that_others_reach_needs_tokens(host: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not loopback") as caught:
        load({"host": host})
    assert caught.value.key == "tokens_file"
    tokens = tmp_path / "tokens"
    tokens.write_text("x")
    assert load({"host": host, "tokens_file": tokens}).settings.host == host


@pytest.mark.parametrize(("host", "answer"), [("127.0.0.1", True), ("127.8.8.8", True), ("::1", True), ("[::1]", True),
                                              ("localhost", True), ("0.0.0.0", False), ("example", False)])  # fmt: skip
def test_is_loopback(host: str, answer: bool) -> None:
    assert is_loopback(host) is answer


def test_a_certificate_needs_its_key(tmp_path: Path) -> None:
    cert = tmp_path / "cert"
    cert.write_text("x")
    with pytest.raises(ConfigError, match="go together") as caught:
        load({"tls_cert_file": cert})
    assert caught.value.key == "tls_key_file"


def test_a_certificate_that_is_none_is_named(tmp_path: Path) -> None:
    (tmp_path / "cert.pem").write_text("no certificate")
    with pytest.raises(ConfigError, match=r"tls_cert_file: .*cert\.pem and .*cert\.pem are no certificate"):
        load({"tls_cert_file": tmp_path / "cert.pem", "tls_key_file": tmp_path / "cert.pem"})


def test_settings_are_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        Settings().port = 1  # type: ignore[misc]


def test_a_password_in_a_url_is_masked() -> None:
    rows = {row["key"]: row["value"] for row in load({"forward_endpoint": "https://u:pw@c:1/v1/traces"}).rows()}
    assert rows["forward_endpoint"] == "https://***@c:1/v1/traces"
    with pytest.raises(ConfigError, match=r"starts with http:// or https://, got 'grpc://\*\*\*@c:4317'"):
        load({"forward_endpoint": "grpc://u:pw@c:4317"})
    with pytest.raises(ConfigError, match=r"'http://\*\*\*@\[c'"):
        load({"forward_endpoint": "http://u:pw@[c"})
    with pytest.raises(ConfigError, match=r"got '\*\*\*@collector:4318'"):
        load({"forward_endpoint": "u:pw@collector:4318"})
    with pytest.raises(ConfigError, match=r"got 'https:/\*\*\*@c'"):
        load({"forward_endpoint": "https:/u:p/w@c"})


def test_every_key_says_what_it_is() -> None:
    assert all(row["description"] for row in load().rows())


def test_state_dir_follows_xdg() -> None:
    assert default_state_dir({"XDG_STATE_HOME": "/x"}) == Path("/x/kvguard")
    assert default_state_dir({}) == Path.home() / ".local/state/kvguard"
    assert default_state_dir({"XDG_STATE_HOME": "relative"}) == Path.home() / ".local/state/kvguard"
