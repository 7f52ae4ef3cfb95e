from pathlib import Path

import pytest

from guard.hook import config as config_module
from guard.hook.config import HookConfig

URL = "http://127.0.0.1:9470"


def read(**env: str) -> HookConfig | None:
    return HookConfig.from_env(env)


def test_off_without_an_endpoint_and_silent(caplog: pytest.LogCaptureFixture):
    assert read() is None
    assert read(KVGUARD_ENDPOINT="  ") is None
    assert read(KVGUARD_PORT="tcp://10.0.0.1:9470", KVGUARD_SERVICE_HOST="10.0.0.1") is None
    assert caplog.records == []


@pytest.mark.parametrize("value", ["off", "OFF", "0", "false", " no "])
def test_off_by_switch(value: str):
    assert read(KVGUARD_ENDPOINT=URL, KVGUARD_HOOK=value) is None


def test_defaults():
    assert read(KVGUARD_ENDPOINT=URL) == HookConfig(
        endpoints=(URL,),
        token_file=None,
        ca_file=None,
        instance=None,
        request_ids=True,
        trace_parent=False,
        ring=8192,
        vllm_metrics=False,
    )


def test_every_setting(tmp_path: Path):
    token, authorities = tmp_path / "token", tmp_path / "ca.pem"
    token.write_text("t")
    authorities.write_text("c")
    assert read(
        KVGUARD_ENDPOINT=f" {URL}/ , https://guard.example:8443/prefix,{URL} ",
        KVGUARD_TOKEN_FILE=str(token),
        KVGUARD_CA_FILE=str(authorities),
        KVGUARD_INSTANCE="10.1.2.3:8000",
        KVGUARD_HOOK="on",
        KVGUARD_REQUEST_IDS="off",
        KVGUARD_TRACE_PARENT="on",
        KVGUARD_RING="128",
        KVGUARD_VLLM_METRICS="on",
    ) == HookConfig(
        endpoints=(URL, "https://guard.example:8443/prefix"),
        token_file=token,
        ca_file=authorities,
        instance="10.1.2.3:8000",
        request_ids=False,
        trace_parent=True,
        ring=128,
        vllm_metrics=True,
    )


@pytest.mark.parametrize(
    ("name", "value", "field", "used"),
    [
        ("KVGUARD_HOOK", "maybe", "endpoints", (URL,)),
        ("KVGUARD_REQUEST_IDS", "nope", "request_ids", True),
        ("KVGUARD_TRACE_PARENT", "2", "trace_parent", False),
        ("KVGUARD_RING", "0", "ring", 8192),
        ("KVGUARD_RING", "-5", "ring", 8192),
        ("KVGUARD_RING", "1e4", "ring", 8192),
        ("KVGUARD_RING", "9" * 5000, "ring", 8192),
        ("KVGUARD_RING", "\u0663\u0663\u0663\u0663", "ring", 8192),
        ("KVGUARD_INSTANCE", "a\nb", "instance", None),
        ("KVGUARD_INSTANCE", "x" * 201, "instance", None),
        ("KVGUARD_INSTANCE", "host:1/", "instance", None),
        ("KVGUARD_CA_FILE", "/no/such/file", "ca_file", None),
        ("KVGUARD_CA_FILE", "a\0b", "ca_file", None),
        ("KVGUARD_TOKEN_FILE", "/no/such/file", "token_file", Path("/no/such/file")),
    ],
)
def test_a_bad_value_costs_one_line_that_names_the_variable(
    name: str, value: str, field: str, used: object, caplog: pytest.LogCaptureFixture
):
    found = HookConfig.from_env({"KVGUARD_ENDPOINT": URL, name: value})
    assert found is not None
    assert getattr(found, field) == used
    assert len(caplog.records) == 1
    assert name in caplog.records[0].getMessage()


@pytest.mark.parametrize(
    "url",
    [
        "127.0.0.1:9470",
        "ftp://host",
        "http://",
        "http://host:99999",
        "http://host:x",
        "http://[::1",
        "http://user:hunter2@host",
        "http://host/?a=1",
        "http://host/\n",
        "http://h st",
    ],
)
def test_a_bad_url_is_left_out_and_the_good_one_stays(url: str, caplog: pytest.LogCaptureFixture):
    found = read(KVGUARD_ENDPOINT=f"{url}/x,{URL}")
    assert found is not None
    assert found.endpoints == (URL,)
    assert len(caplog.records) == 1
    assert "KVGUARD_ENDPOINT" in caplog.text
    assert "hunter2" not in caplog.text


def test_only_bad_urls_turn_the_hook_off(caplog: pytest.LogCaptureFixture):
    assert read(KVGUARD_ENDPOINT="nonsense") is None
    assert "the hook is off" in caplog.records[-1].getMessage()


def test_ipv6_is_an_endpoint():
    found = read(KVGUARD_ENDPOINT="http://[::1]:9470")
    assert found is not None
    assert found.endpoints == ("http://[::1]:9470",)


def test_every_variable_stands_in_the_table():
    table = config_module.__doc__ or ""
    source = Path(config_module.__file__).read_text(encoding="utf-8").split('"""', 2)[2]
    names = {word for word in source.replace('"', " ").split() if word.startswith("KVGUARD_") and word.isupper()}
    names = {name.strip(",:;()") for name in names}
    assert len(names) == 9
    assert all(f"`{name}`" in table for name in names)
