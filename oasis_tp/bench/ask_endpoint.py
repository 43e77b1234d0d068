"""Samples asked of an OpenAI endpoint: /v1/completions, greedily, several at once."""

import json
import os
import urllib.error
import urllib.request
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict
from typing import Any

from oasis_tp.bench.answers import Answer, Mode
from oasis_tp.bench.samples import Sample


class Endpoint:
    """One server. `base_url` with or without its `/v1`; a key is taken from $OPENAI_API_KEY."""

    def __init__(self, base_url: str, model: str | None, *, timeout_s: float) -> None:
        """Raises:
        ValueError: the server cannot be reached, or (without `model`) lists no model.
        """
        url = base_url.rstrip("/")
        self.url = url if url.endswith("/v1") else f"{url}/v1"
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"--base-url {base_url}: an address begins with http:// or https://")
        self._timeout_s = timeout_s
        self.model = model or self._first_model()

    def ask(self, sample: Sample, mode: Mode) -> Answer:
        """One answer, or what the server said against it.

        Raises:
            ValueError: the server cannot be reached.
        """
        body: dict[str, Any] = {
            "model": self.model,
            "prompt": sample.prompt,
            "max_tokens": sample.tokens_to_generate,
            "temperature": 0,
        }
        if mode.mode != "endpoint":
            wanted = asdict(mode.sparsity("auto"))
            for name in ("hot_factor", "prefetch", "fetch_ratio"):  # the server's: they do not change answers
                del wanted[name]
            if mode.mode == "dense":
                wanted = {"attention": "dense"}
            body |= {"sparsity": wanted, "return_kv_stats": True}
        try:
            choice = self._call("/completions", body)["choices"][0]
            text = choice["text"]
        except urllib.error.HTTPError as error:
            return Answer.failed(sample, mode, f"{error.code}: {_message(error)}")
        except (ValueError, LookupError, TypeError) as error:
            if isinstance(error, UnreachableError):
                raise
            return Answer.failed(sample, mode, f"not an answer of a completions endpoint ({error!r})")
        return Answer.to(sample, mode, text, choice.get("kv"))

    def _first_model(self) -> str:
        try:
            return self._call("/models", None)["data"][0]["id"]
        except urllib.error.HTTPError as error:
            raise ValueError(f"--base-url {self.url}: {error.code}: {_message(error)}") from error
        except (LookupError, TypeError) as error:
            raise ValueError(f"--base-url {self.url} lists no model; name one with --served-model") from error

    def _call(self, path: str, body: dict[str, Any] | None) -> Any:
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get("OPENAI_API_KEY"):
            headers["Authorization"] = f"Bearer {key}"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data=data, headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=self._timeout_s) as reply:
                return json.loads(reply.read())
        except urllib.error.HTTPError:
            raise
        except OSError as error:  # refused, reset, timed out, unknown host
            raise UnreachableError(f"--base-url {self.url}: cannot be reached ({error})") from error


class UnreachableError(ValueError):
    """The server is not there: no further sample would fare better."""


def ask_endpoint(endpoint: Endpoint, work: Iterable[tuple[Sample, Mode]], concurrency: int) -> Iterable[Answer]:
    """Answers in the order in which they come.

    Raises:
        ValueError: the server cannot be reached (any more); answers that came before are not lost.
    """
    with ThreadPoolExecutor(concurrency) as pool:
        futures = [pool.submit(endpoint.ask, sample, mode) for sample, mode in work]
        try:
            for future in as_completed(futures):
                yield future.result()
        finally:
            pool.shutdown(cancel_futures=True)


def _message(error: urllib.error.HTTPError) -> str:
    """What the server says, in OpenAI's shape or as it is."""
    text = error.read().decode(errors="replace")
    try:
        return str(json.loads(text)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return text.strip()[:200] or error.reason
