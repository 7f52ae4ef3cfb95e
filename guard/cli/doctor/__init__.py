"""`kvguard doctor`: what would keep the hook from working, found before (or while) vLLM runs.

Standard library only: in vLLM's own environment kvguard is installed without its dependencies.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from guard.cli.doctor import commandline, environment, installed, reach
from guard.cli.doctor.findings import Finding, Level

__all__ = ["Finding", "Level", "examine", "process"]


def examine(
    command: Sequence[str] = (),
    *,
    env: Mapping[str, str] = os.environ,
    python: str = "",
    engine: str = "",
    endpoint: str = "",
    token_file: Path | None = None,
    ca_file: Path | None = None,
    network: bool = True,
    here: bool = True,
) -> list[Finding]:
    """All findings, in the order in which things happen: install, environment, command line, service, engine.

    Args:
        command: vLLM's command line; empty where only environment and service are looked at.
        env: The environment in which vLLM starts or runs.
        python: vLLM's interpreter; empty: this one.
        engine: URL of a running vLLM.
        endpoint: URL of the service; empty: `KVGUARD_ENDPOINT` of `env`.
        token_file: Bearer token; None: `KVGUARD_TOKEN_FILE` of `env`.
        ca_file: Authorities to trust; None: `KVGUARD_CA_FILE` of `env`.
        network: False asks nobody.
        here: False leaves out what is installed and set: `engine` runs elsewhere.
    """
    findings: list[Finding] = []
    if here:
        facts = installed.facts_of(python)
        transfer = commandline.transfer_config(command)
        findings += installed.check(facts)
        findings += environment.check(env, explicit=transfer.explicit)
        findings += environment.check_tracing(env, commandline.option(command, "otlp-traces-endpoint"))
        findings += commandline.check(command, transfer, facts) if command else ()
        findings += environment.check_rdma()
    if network:
        where = endpoint or env.get("KVGUARD_ENDPOINT", "")
        token, authorities = _path(env, "KVGUARD_TOKEN_FILE"), _path(env, "KVGUARD_CA_FILE")
        service = reach.Reach(where, token_file or token, ca_file or authorities)
        if where:
            findings += reach.check_service(service)
        if engine:
            findings += reach.check_engine(engine, service)
    return findings


def process(pid: int) -> tuple[list[str], dict[str, str], str]:
    """Command line, environment and interpreter of a running process.

    Raises:
        OSError: there is no such process, or it is somebody else's.
    """
    folder = Path("/proc") / str(pid)
    arguments = (folder / "cmdline").read_bytes().decode("utf-8", "replace").split("\0")
    pairs = (item.partition("=") for item in (folder / "environ").read_bytes().decode("utf-8", "replace").split("\0"))
    # The link of a virtual environment's python leads to the base one, which has other packages: argv[0] tells it.
    python = arguments[0] if arguments and "python" in Path(arguments[0]).name else str((folder / "exe").readlink())
    return [part for part in arguments if part], {key: value for key, _, value in pairs if key}, python


def _path(env: Mapping[str, str], name: str) -> Path | None:
    value = env.get(name, "").strip()
    return Path(value) if value else None
