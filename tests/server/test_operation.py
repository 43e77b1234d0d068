"""What operators rely on: keys, draining, keep-alive, retry hints, and the tokenizer's routes."""

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest

from oasis_tp.config import ServerConfig
from oasis_tp.server.auth import read_keys

ANSWER = "Grüße, 😀 world! END of story"


def test_a_key_is_asked_for_and_probes_need_none(serve_with: Callable[..., Any]) -> None:
    served = serve_with(api_keys=("secret-ü", "other"))
    for path in ("/health", "/metrics", "/version"):
        assert served.http.get(path).status_code == 200
    wrong: list[dict[str, str]] = [
        {}, {"Authorization": "Bearer nope"}, {"Authorization": "secret"}, {"Authorization": "Basic other"},
        {"Authorization": "Bearer"}, {"Authorization": "Bearer other2"},
    ]  # fmt: skip
    for headers in wrong:
        for path in ("/v1/models", "/tokenizer_info", "/openapi.json", "/nowhere"):
            reply = served.http.get(path, headers=headers)
            assert (reply.status_code, reply.json()["error"]["code"]) == (401, "invalid_api_key"), (path, headers)
        assert served.http.post("/v1/completions", json={"prompt": "x"}, headers=headers).status_code == 401
    assert not served.engine.specs
    assert served.http.get("/v1/models", headers={"Authorization": "bearer secret-ü".encode()}).status_code == 200
    with pytest.raises(openai.AuthenticationError):
        served.openai.models.list()
    client = served.openai.with_options(api_key="other")
    assert client.completions.create(model="tiny", prompt="x", max_tokens=100).choices[0].text == ANSWER


def test_keys_come_from_the_line_and_the_file(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("b\n\n c \n")
    assert read_keys(ServerConfig()) == ()
    assert read_keys(ServerConfig(api_key=("a",), api_key_file=str(file))) == ("a", "b", "c")
    file.write_text("\n")
    with pytest.raises(ValueError, match="no key in it"):
        read_keys(ServerConfig(api_key_file=str(file)))


def test_a_full_queue_says_when_to_come_back(served: Any) -> None:
    served.engine.answering = False
    reply = served.http.post("/v1/completions", json={"prompt": "x", "n": 9})
    assert (reply.status_code, reply.headers["retry-after"]) == (429, "1")


def test_a_silent_stream_is_kept_alive(serve_with: Callable[..., Any]) -> None:
    served = serve_with(sse_keep_alive_interval=0.05)
    served.engine.answering = False
    body = {"prompt": "x", "stream": True, "max_tokens": 100}
    with served.http.stream("POST", "/v1/completions", json=body) as reply:
        lines = reply.iter_lines()
        for _ in range(3):
            assert (next(lines), next(lines)) == (": keep-alive", "")
        served.engine.answering = True
        data = [line[6:] for line in lines if line.startswith("data: ")]
    assert data[-1] == "[DONE]"
    assert "".join(json.loads(line)["choices"][0]["text"] for line in data[:-1]) == ANSWER


def test_a_client_that_leaves_a_silent_stream_is_aborted(serve_with: Callable[..., Any]) -> None:
    served = serve_with(sse_keep_alive_interval=0.02)
    served.engine.answering = False
    with served.http.stream("POST", "/v1/completions", json={"prompt": "x", "stream": True}) as reply:
        assert next(reply.iter_lines()) == ": keep-alive"
    served.engine.wait_until(lambda: len(served.engine.aborted) == 1)


def test_draining_finishes_open_requests_and_refuses_new_ones(served: Any) -> None:
    served.engine.answering = False
    drained: list[bool] = []
    answer: list[str] = []

    def ask() -> None:
        reply = served.openai.completions.create(model="tiny", prompt="x", max_tokens=100)
        answer.append(reply.choices[0].text)

    client = threading.Thread(target=ask)
    client.start()
    served.engine.wait_until(lambda: len(served.engine.specs) == 1)
    assert not served.bridge.drain(0.05, "the server is shutting down"), "a request is open"
    waiting = threading.Thread(target=lambda: drained.append(served.bridge.drain(20, "the server is shutting down")))
    waiting.start()
    reply = served.http.post("/v1/completions", json={"prompt": "x"})
    assert (reply.status_code, reply.json()["error"]["message"]) == (503, "the server is shutting down")
    assert served.http.get("/health").status_code == 503
    served.engine.answering = True
    waiting.join(20)
    client.join(20)
    assert drained == [True] and answer == [ANSWER]


def test_text_to_ids_and_back(served: Any) -> None:
    text = "Grüße, 😀"
    reply = served.http.post("/tokenize", json={"prompt": text, "return_token_strs": True}).json()
    assert reply["tokens"] == served.engine.tokenizer.encode(text)
    assert (reply["count"], reply["max_model_len"]) == (len(text.encode()), 64)
    assert len(reply["token_strs"]) == reply["count"]
    assert served.http.post("/detokenize", json={"tokens": reply["tokens"]}).json() == {"prompt": text}
    chat = served.http.post("/tokenize", json={"messages": [{"role": "user", "content": "hi"}]}).json()
    assert chat["token_strs"] is None
    assert served.http.post("/detokenize", json={"tokens": chat["tokens"]}).json() == {"prompt": "<user>hi<answer>"}
    info = served.http.get("/tokenizer_info").json()
    assert (info["eos_token"], info["vocab_size"], info["model_max_length"]) == ("<|end|>", 257, 64)
    assert info["chat_template"] == served.engine.tokenizer.chat_template


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/tokenize", {}, 400),
        ("/tokenize", {"prompt": "x", "messages": [{"role": "user", "content": "x"}]}, 400),
        ("/tokenize", {"prompt": 5}, 400),
        ("/tokenize", {"prompt": "x", "model": "other"}, 404),
        ("/detokenize", {"tokens": [257]}, 400),
        ("/detokenize", {"tokens": [-1]}, 400),
        ("/detokenize", {"tokens": "x"}, 400),
        ("/detokenize", {}, 400),
    ],
)
def test_the_tokenizer_routes_refuse_what_they_cannot_do(
    served: Any, path: str, body: dict[str, Any], status: int
) -> None:
    reply = served.http.post(path, json=body)
    assert reply.status_code == status and reply.json()["error"]["message"]
