"""The fixture that skips a test where a program is missing, and fails it in CI."""

import pytest


def test_what_is_there_runs(needs):
    needs("sh")


def test_what_is_missing_is_skipped_with_a_reason(needs, monkeypatch):
    monkeypatch.delenv("KVGUARD_CI", raising=False)
    with pytest.raises(pytest.skip.Exception, match="no-such-program is not installed; no luck"):
        needs("sh", "no-such-program", problem="no luck")


def test_ci_fails_instead(needs, monkeypatch):
    monkeypatch.setenv("KVGUARD_CI", "1")
    with pytest.raises(pytest.fail.Exception, match="cannot be skipped in CI: no-such-program"):
        needs("no-such-program")
    needs("sh")
