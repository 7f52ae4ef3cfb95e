"""vLLM's command line: which connector reads the remote tier, and what the hook can do there."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from guard.cli.doctor.findings import Finding, note, ok, problem, warning
from guard.cli.doctor.installed import Facts
from guard.connectors import LMCACHE, LMCACHE_MP, UNKNOWN, Capability, capability_named

PREFIX: Final = "Guarded_"
_MULTI: Final = "MultiConnector"
_EXAMPLE: Final = (
    """--kv-transfer-config '{"kv_connector": "LMCacheMPConnector", "kv_role": "kv_both", """
    """"kv_load_failure_policy": "recompute"}'"""
)


@dataclass(frozen=True, slots=True)
class Transfer:
    """`--kv-transfer-config` as given; `problem` says why it cannot be read."""

    config: Mapping[str, Any] = field(default_factory=dict)
    given: bool = False
    problem: str = ""

    @property
    def explicit(self) -> bool:
        """Whether the guard is named as the connector's module, so that no entry point is needed."""
        return str(self.config.get("kv_connector", "")).startswith(PREFIX)

    def connectors(self) -> list[Mapping[str, Any]]:
        """The connectors that read: the children of a MultiConnector, else the one itself."""
        if self.config.get("kv_connector") != _MULTI:
            return [self.config] if self.config.get("kv_connector") else []
        children = (self.config.get("kv_connector_extra_config") or {}).get("connectors") or []
        return [child for child in children if isinstance(child, dict)]


def option(command: Sequence[str], name: str) -> str | None:
    """The value of `--name VALUE` or `--name=VALUE`, written with dashes or underscores; the last one counts."""
    found = None
    for number, part in enumerate(command):
        key, equals, value = part.partition("=")
        if key.startswith("--") and key[2:].replace("_", "-") == name:
            found = value if equals else (command[number + 1] if number + 1 < len(command) else "")
    return found


def transfer_config(command: Sequence[str]) -> Transfer:
    """Reads `--kv-transfer-config JSON` and vLLM's dotted form (`--kv-transfer-config.kv_role kv_both`)."""
    config: dict[str, Any] = {}
    text = option(command, "kv-transfer-config")
    if text is not None:
        try:
            loaded: object = json.loads(text)
        except ValueError as error:
            return Transfer(given=True, problem=f"--kv-transfer-config is not JSON: {error}")
        if not isinstance(loaded, dict):
            return Transfer(given=True, problem="--kv-transfer-config is not a JSON object")
        config = loaded
    dotted = [part for part in command if part.replace("_", "-").startswith("--kv-transfer-config.")]
    for part in dotted:
        path = part.partition("=")[0].partition(".")[2]
        value = option(command, part.partition("=")[0][2:].replace("_", "-")) or ""
        _put(config, path.split("."), value)
    return Transfer(config, given=text is not None or bool(dotted))


def _put(config: dict[str, Any], path: list[str], text: str) -> None:
    for name in path[:-1]:
        config = config.setdefault(name, {})
    try:
        config[path[-1]] = json.loads(text)
    except ValueError:
        config[path[-1]] = text


def check(command: Sequence[str], transfer: Transfer, facts: Facts) -> Iterator[Finding]:
    """The findings about a command line."""
    if option(command, "config"):
        yield note("command line", "options in the file of --config are not read here: give them on the command line")
    if transfer.problem:
        yield problem("connector", transfer.problem, f"quote it for the shell: {_EXAMPLE}")
        return
    connectors = transfer.connectors()
    if not connectors:
        what = "the MultiConnector has no children" if transfer.given else "no --kv-transfer-config"
        yield problem("connector", f"{what}: vLLM has no remote tier to guard", f"add {_EXAMPLE}")
        return
    for config in connectors:
        yield from _connector(config, facts)
    yield from _policy(transfer.config)


def _connector(config: Mapping[str, Any], facts: Facts) -> Iterator[Finding]:
    name = str(config.get("kv_connector", ""))
    entry = capability_named(name.removeprefix(PREFIX))
    if name.startswith(PREFIX) and config.get("kv_connector_module_path") != "guard.hook.plugin":
        yield problem("connector", f'{name} needs "kv_connector_module_path": "guard.hook.plugin"')
    role = str(config.get("kv_role") or "kv_both")
    if entry.handoff or role in ("kv_producer", "kv_consumer"):
        yield warning("connector", f"{name} ({role}) hands KV from prefill to decode: traced, never refused")
        return
    if entry is UNKNOWN:
        yield warning("connector", f"{name} is not known: declined at its answer only, spans without reads", "tell us")
    else:
        yield ok("connector", f"{name}: {_can(entry)}")
        if not entry.run:
            yield warning("connector", f"{name} was read from source only, nobody has run the hook on it yet")
    yield from _cannot(name, entry, config.get("kv_connector_extra_config") or {}, facts)


def _can(entry: Capability) -> str:
    parts = [f"skip saves {entry.skip_saves}"] if entry.skip else ["no skip"]
    parts.append(f"decline saves {entry.decline_saves}" if entry.decline else "no decline")
    parts.append("stores can be stopped" if entry.stop_stores else "stores cannot be stopped")
    parts.append("single reads are seen" if entry.reads_in_process else "single reads are not seen")
    return "; ".join(parts)


def _cannot(name: str, entry: Capability, extra: Mapping[str, Any], facts: Facts) -> Iterator[Finding]:
    if entry.lookup_blocks:
        yield note("connector", f"{name}: its lookup blocks vLLM's scheduler for its round trips, for all requests")
    if entry is LMCACHE_MP and extra.get("lmcache.mp.eager_prefetch"):
        yield note("connector", f"{name}: with eager_prefetch the reads start when a request arrives; skip acts there")
    if entry is LMCACHE_MP and not extra.get("kvguard.store"):
        yield note(
            "connector", f"{name} does not tell vLLM which store it uses: the backend is labelled lmcache-mp",
            'name it: "kvguard.store": "resp" in kv_connector_extra_config',
        )  # fmt: skip
    if entry in (LMCACHE, LMCACHE_MP) and facts.vllm and "lmcache" not in facts.versions:
        yield problem("lmcache", f"{name} needs LMCache, which is not installed there", "pip install lmcache")


def _policy(config: Mapping[str, Any]) -> Iterator[Finding]:
    policy = config.get("kv_load_failure_policy")
    if policy == "recompute":
        yield ok("load failures", "a failed load is recomputed")
    else:
        yield problem(
            "load failures",
            f"kv_load_failure_policy is {policy or 'not set (so: fail)'}: a failed load fails the request or vLLM",
            'set "kv_load_failure_policy": "recompute"',
        )
