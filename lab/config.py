"""What a lab stack is made of."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

CONNECTORS = ("lmcache-mp", "lmcache", "example", "multi", "none")
INJECTORS = ("auto", "tun", "proxy", "none")


@dataclass(frozen=True, kw_only=True)
class StackConfig:
    """One set-up of vLLM, LMCache, Redis and kvguard. The defaults are the ones of `make lab`.

    Attributes:
        connector: lmcache-mp (LMCache as a server of its own, asynchronous loads), lmcache (inside vLLM, synchronous),
            example (vLLM's disk connector), multi (lmcache-mp, then example), none.
        injector: tun (delays packets; needs the lab's namespace), proxy (TCP), none, auto (tun where possible).
        command_proxy: puts `proxy.py` into the road as well, to delay and count single Redis commands.
        chunk_size: tokens per LMCache chunk, which is one Redis key.
        l2_workers: connections of LMCache's server to Redis; 1 makes all reads of a request serial.
        skip_l1: LMCache's server drops chunks from its memory once they are in Redis.
        eager_prefetch: LMCache looks up when the request arrives, not when it is first scheduled.
        failure_policy: vLLM's kv_load_failure_policy.
        dtype: float32, since bfloat16 is about 30 times slower on a CPU without AVX512-BF16.
        hook: whether kvguard's hook is on in vLLM.
        service: whether `kvguard serve` runs (the hook fails open without).
        probe: whether kvguard probes the store (PING) on LMCache's road, for RTT.
        otlp: where vLLM's own spans go: None, "service" (OTLP/HTTP), "rotel" (gRPC to a collector, then on).
        one_core: the model computes on one core and leaves the others to the API server, LMCache and Redis: slower, and
            steadier where there are but two.
        hook_env, service_env, vllm_args: additions.
    """

    connector: str = "lmcache-mp"
    injector: str = "auto"
    command_proxy: bool = False
    mtu: int = 9000
    chunk_size: int = 256
    l2_workers: int = 1
    skip_l1: bool = True
    eager_prefetch: bool = False
    failure_policy: str = "recompute"
    hook: bool = True
    service: bool = True
    probe: bool = False
    otlp: str | None = None
    dtype: str = "float32"
    max_model_len: int = 8192
    max_num_seqs: int | None = None
    kv_cache_gib: int = 1
    vllm_start_seconds: float = 480.0
    one_core: bool = False
    hook_env: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    service_env: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    vllm_args: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name, value, allowed in (
            ("connector", self.connector, CONNECTORS),
            ("injector", self.injector, INJECTORS),
            ("otlp", self.otlp, (None, "service", "rotel")),
        ):
            if value not in allowed:
                raise ValueError(f"{name}: {value!r} is not one of {', '.join(map(str, allowed))}")

    @property
    def backend(self) -> str:
        """The remote tier as kvguard names it."""
        return "lmcache/redis" if self.connector == "lmcache" else "lmcache-mp"

    @property
    def uses_server(self) -> bool:
        """Whether LMCache's server is part of the stack."""
        return self.connector in ("lmcache-mp", "multi")

    @property
    def uses_store(self) -> bool:
        """Whether Redis is part of the stack."""
        return self.uses_server or self.connector == "lmcache"
