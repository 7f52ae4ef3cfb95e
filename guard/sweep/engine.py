"""The live engine as a sweep uses it: an OpenAI-compatible vLLM that is sent prompts and asked to forget them."""

import json
import random
import time
import uuid
from dataclasses import dataclass
from typing import Any, Final, Self

import httpx2

from guard.errors import SweepError

REQUEST_SECONDS: Final = 600.0
RESET_SECONDS: Final = 15.0
_LETTERS: Final = "abcdefghijklmnopqrstuvwxyz"


@dataclass(frozen=True, slots=True)
class Answer:
    """One request as its client saw it; `ttft` in seconds from sending to the first token."""

    request_id: str
    ttft: float
    prompt_tokens: int


class Engine:
    """Talks to vLLM at `url`. `resets` are (URL, JSON body) to post to so that local tiers forget their KV."""

    def __init__(self, url: str, resets: tuple[tuple[str, str], ...] = (), *, api_key: str = "") -> None:
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=1024)
        self._http = httpx2.Client(
            base_url=url, headers=headers, timeout=REQUEST_SECONDS, trust_env=False, limits=limits
        )
        self._url = url
        self._resets = resets or ((f"{url}/reset_prefix_cache", ""),)
        self.model = self._model()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def complete(self, prompt: str, output_tokens: int) -> Answer:
        """Sends a prompt and waits for the whole answer.

        Raises:
            SweepError: vLLM refused it or broke off.
        """
        name = f"kvguard-sweep-{uuid.uuid4().hex[:16]}"
        body = {
            "model": self.model, "prompt": prompt, "max_tokens": output_tokens, "temperature": 0, "ignore_eos": True,
            "stream": True, "stream_options": {"include_usage": True},
        }  # fmt: skip
        ttft, tokens, began = None, 0, time.perf_counter()
        try:
            with self._http.stream("POST", "/v1/completions", json=body, headers={"X-Request-Id": name}) as response:
                if response.status_code != 200:
                    text = response.read()[:500].decode(errors="replace")
                    raise SweepError(f"vLLM answered {response.status_code}: {text}")
                for line in response.iter_lines():
                    if not line.startswith("data: {"):
                        continue
                    event = json.loads(line[6:])
                    if "error" in event:
                        raise SweepError(f"vLLM failed in mid-answer: {event['error']}")
                    if event["choices"] and ttft is None:
                        ttft = time.perf_counter() - began
                    tokens = (event.get("usage") or {}).get("prompt_tokens", tokens)
        except httpx2.HTTPError as error:
            raise SweepError(f"vLLM at {self._url}: {error or type(error).__name__}") from None
        if ttft is None:
            raise SweepError("vLLM answered without a token")
        return Answer(f"cmpl-{name}-0", ttft, tokens)

    def forget(self) -> None:
        """Empties the local tiers, so that the next hit comes from the remote one.

        Raises:
            SweepError: one of them will not; says what to set.
        """
        for url, body in self._resets:
            self._reset(url, body)

    def _reset(self, url: str, body: str) -> None:
        end = time.monotonic() + RESET_SECONDS
        while True:
            try:
                response = self._http.post(url, content=body, headers={"Content-Type": "application/json"})
            except httpx2.HTTPError as error:
                raise SweepError(f"{url}: {error}") from None
            if response.status_code == 404:
                raise SweepError(
                    f"{url} does not exist: start vLLM with VLLM_SERVER_DEV_MODE=1, or name with --reset what empties"
                    " the local cache"
                )
            if response.is_success and _succeeded(response):
                return
            if time.monotonic() > end:  # requests that are just ending still hold blocks
                raise SweepError(f"{url}: not emptied after {RESET_SECONDS:g} s: {response.status_code}")
            time.sleep(0.05)

    def _model(self) -> str:
        try:
            answer: Any = self._http.get("/v1/models").raise_for_status().json()
            return str(answer["data"][0]["id"])
        except (httpx2.HTTPError, ValueError, LookupError, TypeError) as error:
            raise SweepError(f"no vLLM answers at {self._url}/v1/models: {error}") from None


class Prompts:
    """Distinct prompts of about as many tokens as wanted, made of random words; the same seed gives the same ones."""

    def __init__(self, engine: Engine, tokens: int, seed: int) -> None:
        self._seed = seed
        sample = self._words(400, random.Random(f"{seed}/sample"))  # noqa: S311
        counted = engine.complete(sample, 1).prompt_tokens
        self._letters = max(8, round(len(sample) * tokens / max(counted, 1)))

    def make(self, number: int) -> str:
        """Prompt `number`."""
        return self._words(self._letters, random.Random(f"{self._seed}/{number}"))  # noqa: S311

    @staticmethod
    def _words(letters: int, rng: random.Random) -> str:
        words, length = [], 0
        while length <= letters:
            word = "".join(rng.choices(_LETTERS, k=rng.randint(2, 8)))
            words.append(word)
            length += len(word) + 1
        return " ".join(words)[:letters]


def _succeeded(response: httpx2.Response) -> bool:
    try:
        answer = response.json()
    except ValueError:
        return True
    return not (isinstance(answer, dict) and answer.get("success") is False)
