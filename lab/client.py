"""A streaming client of vLLM's completions API that measures what a user would see, and prompts to send."""

import http.client
import json
import random
import secrets
import time
from dataclasses import dataclass, field
from typing import Any

from lab.errors import LabError

ALPHABET = "abcdefghijklmnopqrstuvwxyz "


def prompt(tokens: int, seed: int) -> str:
    """A prompt of exactly so many tokens (the lab's tokenizer: one per character); equal seeds give equal prompts."""
    return "".join(random.Random(seed).choices(ALPHABET, k=tokens))


def traceparent() -> tuple[str, str]:
    """A fresh W3C trace context header, sampled, and its trace id."""
    trace_id = secrets.token_hex(16)
    return f"00-{trace_id}-{secrets.token_hex(8)}-01", trace_id


@dataclass(kw_only=True)
class Completion:
    """One answered request. Times in seconds on the client's clock, from just before the request is sent.

    Attributes:
        request_id: vLLM's external id, as `gen_ai.request.id` of its spans (`cmpl-...-0`).
        ttft: until the first event that carries a token; None when the request was aborted before.
        tokens: token ids. logprobs: of those tokens, when asked for. top: per token the alternatives' logprobs.
        cached: prompt tokens that were not computed, local and remote together, as vLLM counts them.
    """

    request_id: str = ""
    ttft: float | None = None
    e2e: float = 0.0
    prompt_tokens: int = 0
    cached: int = 0
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top: list[dict[str, float]] = field(default_factory=list)


class Client:
    """Talks to one vLLM server. Safe to use from several threads: a connection per request."""

    def __init__(self, port: int, host: str = "127.0.0.1", timeout: float = 120.0) -> None:
        self.host, self.port, self.timeout = host, port, timeout

    def complete(
        self,
        text: str,
        *,
        max_tokens: int = 12,
        logprobs: int | None = None,
        request_id: str | None = None,
        headers: dict[str, str] | None = None,
        abort_after: float | None = None,
        **body: Any,
    ) -> Completion:
        """Sends a prompt with temperature 0 and reads the stream to its end.

        Args:
            text: the prompt.
            max_tokens: length of the answer; it is never shorter.
            logprobs: asks for the logprobs of the sampled tokens and of so many alternatives.
            request_id: sent as `X-Request-Id`; vLLM's external id becomes `cmpl-<request_id>-0`.
            headers: more HTTP headers, `traceparent` for one.
            abort_after: hangs up after so many seconds without a token.
            body: more fields of the request.

        Raises:
            LabError: vLLM answered with an error status.
            OSError: the connection broke.
        """
        fields = {"model": "lab", "prompt": text, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
        fields |= {"stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True}
        fields |= body | ({} if logprobs is None else {"logprobs": logprobs})
        request_id = request_id or secrets.token_hex(8)
        head = {"Content-Type": "application/json", "X-Request-Id": request_id, **(headers or {})}
        connection = http.client.HTTPConnection(self.host, self.port, timeout=abort_after or self.timeout)
        done = Completion(request_id=f"cmpl-{request_id}-0")
        started = time.perf_counter()
        try:
            connection.request("POST", "/v1/completions", json.dumps(fields), head)
            answer = connection.getresponse()
            if answer.status != 200:
                raise LabError(f"vLLM answered {answer.status}: {answer.read(2000).decode(errors='replace')}")
            for line in answer:
                if line.startswith(b"data: {"):
                    self._take(done, json.loads(line[6:]), time.perf_counter() - started)
                    if connection.sock is not None:
                        connection.sock.settimeout(self.timeout)
        except TimeoutError:
            if abort_after is None:
                raise
        finally:
            connection.close()
        done.e2e = time.perf_counter() - started
        return done

    @staticmethod
    def _take(done: Completion, event: dict[str, Any], now: float) -> None:
        if "error" in event:
            raise LabError(f"vLLM failed in mid-stream: {event['error']}")
        if usage := event.get("usage"):
            done.prompt_tokens = usage["prompt_tokens"]
            done.cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        for choice in event["choices"]:
            if done.ttft is None:
                done.ttft = now
            done.tokens += choice.get("token_ids") or []
            if found := choice.get("logprobs"):
                done.logprobs += found["token_logprobs"]
                done.top += found["top_logprobs"] or []

    def reset_prefix_cache(self) -> None:
        """Empties vLLM's own prefix cache, so that the next request of a known prompt is a remote hit or a miss.

        Raises:
            LabError: vLLM could not, because requests still hold blocks after 10 s.
        """
        deadline = time.monotonic() + 10.0
        while True:
            connection = http.client.HTTPConnection(self.host, self.port, timeout=10)
            try:
                connection.request("POST", "/reset_prefix_cache")
                answer = connection.getresponse()
                text = answer.read().decode()
            finally:
                connection.close()
            if answer.status == 200 and json.loads(text)["success"]:
                return
            if time.monotonic() > deadline:
                raise LabError(f"vLLM did not reset its prefix cache: {answer.status} {text}")
            time.sleep(0.05)

    def get(self, path: str) -> str:
        """Body of a GET, `/metrics` for one."""
        connection = http.client.HTTPConnection(self.host, self.port, timeout=10)
        try:
            connection.request("GET", path)
            return connection.getresponse().read().decode()
        finally:
            connection.close()
