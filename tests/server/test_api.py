"""The HTTP surface as the openai client and plain HTTP see it."""

import json
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from oasis_tp.server.body_limit import MAX_BODY_BYTES

ANSWER = "Grüße, 😀 world! END of story"
PROMPT = "Say it:"
CHAT: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "Say "}, {"type": "text", "text": "it"}]}]
NUM_TOKENS = len(ANSWER.encode()) + 1


def events(text: str) -> list[Any]:
    """The data of a server-sent stream; its last line must be `[DONE]`."""
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_models_version_health_and_unknown_paths(served: Any) -> None:
    models = served.openai.models.list().data
    assert [(model.id, model.max_model_len) for model in models] == [("tiny", 64), ("alias", 64)]
    assert served.http.get("/health").status_code == 200
    assert set(served.http.get("/version").json()) == {"version"}
    for reply, status in ((served.http.get("/nowhere"), 404), (served.http.get("/v1/completions"), 405)):
        assert reply.status_code == status and set(reply.json()["error"]) == {"message", "type", "param", "code"}


def test_completion(served: Any) -> None:
    reply = served.openai.completions.create(model="tiny", prompt=PROMPT, max_tokens=100, temperature=0)
    assert (reply.choices[0].text, reply.choices[0].finish_reason) == (ANSWER, "stop")
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (len(PROMPT), NUM_TOKENS)
    assert (reply.model, reply.object) == ("tiny", "text_completion")
    assert served.engine.specs[0].sampling.temperature == 0


def test_completion_defaults_to_16_tokens_and_chat_to_the_window(served: Any) -> None:
    reply = served.openai.completions.create(model="tiny", prompt=PROMPT)
    assert (reply.usage.completion_tokens, reply.choices[0].finish_reason) == (16, "length")
    served.openai.chat.completions.create(model="tiny", messages=CHAT)
    assert served.engine.specs[1].sampling.max_tokens is None


def test_streamed_completion_equals_the_whole_one(served: Any) -> None:
    chunks = list(
        served.openai.completions.create(
            model="alias", prompt=PROMPT, max_tokens=100, stream=True, stream_options={"include_usage": True}
        )
    )
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == ANSWER
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 2) + ["stop"]
    assert (chunks[-1].choices, chunks[-1].usage.completion_tokens) == ([], NUM_TOKENS)
    assert len({chunk.id for chunk in chunks}) == 1


def test_chat_streamed_and_not(served: Any) -> None:
    whole = served.openai.chat.completions.create(model="tiny", messages=CHAT, max_completion_tokens=100)
    assert (whole.choices[0].message.content, whole.choices[0].message.role) == (ANSWER, "assistant")
    prompt = served.engine.tokenizer.decode(list(served.engine.specs[0].prompt_ids))
    assert prompt == "<user>Say it<answer>"
    chunks = list(served.openai.chat.completions.create(model="tiny", messages=CHAT, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == ANSWER
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_prompts_in_all_four_shapes_and_n(served: Any) -> None:
    ids = [1, 2, 3]
    for prompt, count in ((PROMPT, 1), ([PROMPT, "b"], 2), (ids, 1), ([ids, [4]], 2)):
        reply = served.openai.completions.create(model="tiny", prompt=prompt, n=2, seed=7, max_tokens=3)
        assert [choice.index for choice in reply.choices] == list(range(2 * count))
        assert reply.usage.completion_tokens == 3 * 2 * count
        specs = served.engine.specs[-2 * count :]
        assert [spec.sampling.seed for spec in specs] == [7, 8] * count
        assert [spec.fork_of for spec in specs[:2]] == [None, specs[0].request_id]
        assert specs[0].prompt_ids == specs[1].prompt_ids
    assert served.engine.specs[-1].prompt_ids == (4,)


@pytest.mark.parametrize("stop", ["END", ["xx", "END of"]])
def test_a_stop_string_across_tokens_ends_the_request_and_never_leaks(served: Any, stop: Any) -> None:
    served.engine.endless = True
    body = {
        "model": "tiny",
        "prompt": PROMPT,
        "max_tokens": 10000,
        "stop": stop,
        "stream": True,
        "return_kv_stats": True,
    }
    chunks = events(served.http.post("/v1/completions", json=body).text)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == ANSWER.split("END")[0]
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    assert chunks[-1]["choices"][0]["kv"]["mode"] == "resolve"
    served.engine.wait_until(lambda: served.engine.aborted == {served.engine.specs[0].request_id})


def test_logprobs_in_both_shapes(served: Any) -> None:
    reply = served.openai.completions.create(model="tiny", prompt=PROMPT, max_tokens=3, logprobs=3)
    logprobs = reply.choices[0].logprobs
    assert logprobs.tokens[0] == "G" and logprobs.token_logprobs == [-0.5] * 3
    assert logprobs.text_offset[:2] == [0, 1]
    assert [len(top) for top in logprobs.top_logprobs] == [3] * 3
    assert min(logprobs.top_logprobs[0].values()) == -9999.0, "minus infinity has no JSON"
    chat = served.openai.chat.completions.create(
        model="tiny", messages=CHAT, max_tokens=3, logprobs=True, top_logprobs=2
    )
    content = chat.choices[0].logprobs.content
    assert (content[0].token, content[0].bytes, len(content[0].top_logprobs)) == ("G", [ord("G")], 2)
    assert content[2].bytes is None, "half a character"


def test_kv_statistics_come_on_request_only(served: Any) -> None:
    body = {"prompt": PROMPT, "max_tokens": 3}
    assert "kv" not in served.http.post("/v1/completions", json=body).json()["choices"][0]
    body |= {"return_kv_stats": True}
    assert served.http.post("/v1/completions", json=body).json()["choices"][0]["kv"]["hit_rate"] == 0.9
    last = events(served.http.post("/v1/completions", json=body | {"stream": True}).text)[-1]
    assert last["choices"][0]["kv"]["mode"] == "resolve"


def test_sparsity_of_one_request(served: Any) -> None:
    body = {"prompt": PROMPT, "max_tokens": 1}
    served.http.post("/v1/completions", json=body)
    served.http.post("/v1/completions", json=body | {"sparsity": {"budget_tokens": 256, "sketch": "minmax"}})
    plain, changed = (spec.sparsity for spec in served.engine.specs)
    assert plain is None
    assert (changed.budget_tokens, changed.sketch, changed.recent_tokens) == (256, "minmax", 128)


def test_neutral_fields_are_accepted(served: Any) -> None:
    neutral = {"frequency_penalty": 0, "presence_penalty": 0.0, "logit_bias": None, "user": "u", "best_of": 1, "n": 1}
    reply = served.http.post("/v1/completions", json={"prompt": PROMPT, "echo": False, "suffix": None, **neutral})
    assert reply.status_code == 200
    reply = served.http.post(
        "/v1/chat/completions",
        json={"messages": CHAT, "tools": [], "response_format": {"type": "text"}, "logprobs": None},
    )
    assert reply.status_code == 200


def test_penalties_and_bias_reach_the_engine(served: Any) -> None:
    body = {"presence_penalty": 0.5, "frequency_penalty": -1, "logit_bias": {"5": -100, "7": 2.5}}
    served.openai.completions.create(model="tiny", prompt=PROMPT, extra_body={"repetition_penalty": 1.2}, **body)
    sampling = served.engine.specs[0].sampling
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (0.5, -1.0, 1.2)
    assert sampling.logit_bias == ((5, -100.0), (7, 2.5))


@pytest.mark.parametrize("prompt", [PROMPT, [83, 97, 121]])
def test_echo_puts_the_prompt_first_once(served: Any, prompt: Any) -> None:
    first = prompt if isinstance(prompt, str) else served.engine.tokenizer.decode(prompt)
    body = {"model": "tiny", "prompt": [prompt, prompt], "max_tokens": 100, "echo": True, "n": 2}
    reply = served.openai.completions.create(**body)
    assert [choice.text for choice in reply.choices] == [first + ANSWER] * 4
    texts = ["", "", "", ""]
    for chunk in served.openai.completions.create(**body, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [first + ANSWER] * 4


@pytest.mark.parametrize("prompt", [PROMPT, [50, 64, 88, 256]])
@pytest.mark.parametrize("max_tokens", [0, 2])
def test_echo_reports_the_prompt_s_logprobs(served: Any, prompt: Any, max_tokens: int) -> None:
    ids = served.engine.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
    names = [served.engine.tokenizer.backend.decode([token], skip_special_tokens=False) for token in ids]
    body = {"model": "tiny", "prompt": [prompt, prompt], "max_tokens": max_tokens, "echo": True, "logprobs": 2}
    reply = served.openai.completions.create(**body)
    for choice in reply.choices:
        logprobs = choice.logprobs
        assert choice.text == "".join(names) + ANSWER[:max_tokens]
        assert logprobs.tokens[: len(ids)] == names
        assert logprobs.token_logprobs == [None] + [-0.25] * (len(ids) - 1) + [-0.5] * max_tokens
        assert logprobs.top_logprobs[0] is None and len(logprobs.top_logprobs) == len(ids) + max_tokens
        other = served.engine.tokenizer.backend.decode([65])
        assert logprobs.top_logprobs[1] == {names[1]: -0.25, other: -2.0}
        assert logprobs.text_offset == [len("".join(logprobs.tokens[:index])) for index in range(len(logprobs.tokens))]
        assert choice.finish_reason == "length"
    assert reply.usage.completion_tokens == 2 * max_tokens
    chunks = list(served.openai.completions.create(**body, stream=True))
    for index, choice in enumerate(reply.choices):
        deltas = [chunk.choices[0] for chunk in chunks if chunk.choices[0].index == index]
        assert "".join(delta.text for delta in deltas) == choice.text
        reports = [delta.logprobs for delta in deltas if delta.logprobs]
        assert [value for report in reports for value in report.token_logprobs] == choice.logprobs.token_logprobs


HORRORS = [
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [""]}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": [[1], []]}, "prompt"),
    ({"prompt": None}, "prompt"),
    ({}, "prompt"),
    ({"prompt": 5}, "prompt"),
    ({"prompt": [1, "a"]}, "prompt"),
    ({"prompt": [1.5]}, "prompt"),
    ({"prompt": [True]}, "prompt"),
    ({"prompt": {"a": 1}}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [257]}, "prompt"),
    ({"prompt": [10**30]}, "prompt"),
    ({"prompt": "x", "max_tokens": 0}, "max_tokens"),
    ({"prompt": "x", "max_tokens": -1}, "max_tokens"),
    ({"prompt": "x", "max_tokens": 2**40}, "max_tokens"),
    ({"prompt": "x", "max_tokens": "5"}, "max_tokens"),
    ({"prompt": "x", "max_tokens": 1.5}, "max_tokens"),
    ({"prompt": "x", "temperature": -1}, "temperature"),
    ({"prompt": "x", "temperature": "hot"}, "temperature"),
    ({"prompt": "x", "top_p": 0}, "top_p"),
    ({"prompt": "x", "top_k": -2}, "top_k"),
    ({"prompt": "x", "top_k": 2**31}, "top_k"),
    ({"prompt": "x", "min_p": 2}, "min_p"),
    ({"prompt": "x", "seed": 2**63}, "seed"),
    ({"prompt": "x", "n": 0}, "n"),
    ({"prompt": "x", "n": 10**9}, "n"),
    ({"prompt": "x", "stop": [""]}, "stop"),
    ({"prompt": "x", "stop": 3}, "stop"),
    ({"prompt": "x", "stop_token_ids": [-1]}, "stop_token_ids.0"),
    ({"prompt": "x", "logprobs": 21}, "logprobs"),
    ({"prompt": "x", "logprobs": True}, "logprobs"),
    ({"prompt": "x", "stream": "yes"}, "stream"),
    ({"prompt": "x", "stream_options": {"unknown": 1}}, "stream_options.unknown"),
    ({"prompt": "x", "frequency_penalty": 2.5}, "frequency_penalty"),
    ({"prompt": "x", "presence_penalty": -2.5}, "presence_penalty"),
    ({"prompt": "x", "repetition_penalty": 0}, "repetition_penalty"),
    ({"prompt": "x", "echo": True, "max_tokens": -1}, "max_tokens"),
    ({"messages": CHAT, "max_tokens": 0}, "max_tokens"),
    ({"messages": CHAT, "max_completion_tokens": 0}, "max_completion_tokens"),
    ({"messages": CHAT, "max_completion_tokens": 0, "max_tokens": 5}, "max_completion_tokens"),
    ({"prompt": "x", "logit_bias": {"-5": 1}}, "logit_bias"),
    ({"prompt": "x", "logit_bias": {"x": 1}}, "logit_bias"),
    ({"prompt": "x", "logit_bias": {"5": 101}}, "logit_bias"),
    ({"prompt": "x", "logit_bias": {"5": 1, "05": 1}}, "logit_bias"),
    ({"prompt": "x", "logit_bias": [1]}, "logit_bias"),
    ({"prompt": "x", "temprature": 1}, "temprature"),
    ({"prompt": "x", "sparsity": {"budget_tokens": 0}}, "sparsity.budget_tokens"),
    ({"prompt": "x", "sparsity": {"recent_tokens": 1}}, "sparsity.recent_tokens"),
    ({"prompt": "x", "sparsity": {"sketch": "3bit"}}, "sparsity.sketch"),
    ({"prompt": "x", "sparsity": {"hot_factor": 2}}, "sparsity.hot_factor"),
    ({"prompt": "x", "sparsity": {"budget": 2}}, "sparsity.budget"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "user", "content": "x" * 64}]}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": [{"role": "user"}]}, "messages.0.content"),
    ({"messages": [{"role": "king", "content": "x"}]}, "messages.0.role"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages.0.content"),
    ({"messages": CHAT, "tools": [{"type": "function"}]}, "tools"),
    ({"messages": CHAT, "response_format": {"type": "json_object"}}, "response_format"),
    ({"messages": CHAT, "top_logprobs": 2}, "top_logprobs"),
    ({"messages": CHAT, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
]


def test_horrors_are_refused_by_name_and_the_next_request_works(served: Any) -> None:
    for body, param in HORRORS:
        path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        reply = served.http.post(path, json=body)
        error = reply.json().get("error", {})
        assert (reply.status_code, error.get("param")) == (400, param), (body, reply.text)
        assert error["type"] == "invalid_request_error" and error["message"]
    assert not served.engine.specs, "nothing of them reached the engine"
    assert served.http.post("/v1/completions", json={"prompt": PROMPT}).status_code == 200


@pytest.mark.parametrize(
    "content",
    [
        b'{"prompt": "x", "temperature": NaN}',
        b'{"prompt": "x", "top_p": Infinity}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": ["\\udfff"]}',
        b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
        b'{"prompt": "x", "stop": "\\ud800"}',
        b'{"prompt": "x", "\\ud800": 1}',
        b'{"prompt": "x", "model": "\\ud800"}',
        b'{"prompt": "\xff"}',
        b'{"prompt": ',
        b"[]",
        b"null",
        b"",
        b"[" * 100_000,
    ],
)
def test_malformed_bodies_are_400(served: Any, content: bytes) -> None:
    path = "/v1/chat/completions" if b"messages" in content else "/v1/completions"
    reply = served.http.post(path, content=content, headers={"Content-Type": "application/json"})
    assert reply.status_code == 400 and reply.json()["error"]["message"], reply.text
    assert not served.engine.specs


def chunked(num_bytes: int) -> Iterator[bytes]:
    """A body that does not say how long it is."""
    for _ in range(0, num_bytes, 2**16):
        yield b" " * 2**16


def test_a_body_that_no_request_needs_is_not_read(served: Any) -> None:
    too_long = MAX_BODY_BYTES + 2**16
    headers = {"Content-Type": "application/json"}
    for content in (b" " * too_long, chunked(too_long)):
        reply = served.http.post("/v1/completions", content=content, headers=headers)
        assert (reply.status_code, reply.json()["error"]["type"]) == (413, "invalid_request_error")
        assert str(MAX_BODY_BYTES) in reply.json()["error"]["message"]
    padded = b" " * (MAX_BODY_BYTES - 100) + b'{"prompt": "x"}'
    assert served.http.post("/v1/completions", content=padded, headers=headers).status_code == 200


def test_too_long_names_both_numbers_and_unknown_model_is_404(served: Any) -> None:
    with pytest.raises(openai.BadRequestError, match=r"(?s)64.*64"):
        served.openai.completions.create(model="tiny", prompt="x" * 64)
    assert served.openai.completions.create(model="tiny", prompt="x" * 63, max_tokens=1).choices
    with pytest.raises(openai.NotFoundError, match="other"):
        served.openai.completions.create(model="other", prompt="x")


def test_a_refused_fork_leaves_none_of_its_siblings_running(served: Any) -> None:
    served.engine.answering = False
    reply = served.http.post("/v1/completions", json={"prompt": PROMPT, "n": 9})
    assert (reply.status_code, reply.json()["error"]["message"]) == (429, "8 requests are waiting")
    assert len(served.engine.aborted) == 8


def raw_post(served: Any, body: dict[str, Any]) -> socket.socket:
    """Send a request and leave the reply to the caller."""
    host, port = served.url.removeprefix("http://").split(":")
    data = json.dumps(body).encode()
    connection = socket.create_connection((host, int(port)), timeout=20)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}"
    connection.sendall(head.encode() + b"\r\n\r\n" + data)
    return connection


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("answering", [True, False])
def test_a_client_that_goes_away_is_aborted(served: Any, stream: bool, answering: bool) -> None:
    """Mid-answer and mid-prefill, streamed or not, with every choice."""
    served.engine.endless, served.engine.answering = True, answering
    connection = raw_post(served, {"prompt": PROMPT, "n": 2, "max_tokens": 10**6, "stream": stream})
    if stream and answering:
        assert connection.recv(100)
    served.engine.wait_until(lambda: len(served.engine.specs) == 2)
    connection.close()
    served.engine.wait_until(lambda: len(served.engine.aborted) == 2)


def test_health_answers_while_a_long_prompt_is_tokenised(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    entered, release = threading.Event(), threading.Event()

    def slow_encode(text: str, add_special_tokens: bool = True) -> list[int]:
        entered.set()
        assert release.wait(20)
        return [1]

    monkeypatch.setattr(served.engine.tokenizer, "encode", slow_encode)
    connection = raw_post(served, {"prompt": "x"})
    assert entered.wait(10)
    assert served.http.get("/health", timeout=5).status_code == 200
    release.set()
    assert connection.recv(12) == b"HTTP/1.1 200"
    connection.close()


def test_health_turns_503_when_the_engine_is_dead_or_hangs(served: Any) -> None:
    served.engine.answering = False
    connection = raw_post(served, {"prompt": PROMPT})
    served.engine.wait_until(lambda: len(served.engine.specs) == 1)
    served.engine.stop()
    served._engine_thread.join()
    served.engine.counts.last_step_time = time.monotonic() - 1000
    assert served.http.get("/health").status_code == 503
    served.engine.counts.last_step_time = time.monotonic()
    assert served.http.get("/health").status_code == 200
    served.engine.counts.dead = "rank 1 has gone"
    assert served.http.get("/health").json()["error"]["message"] == "rank 1 has gone"
    assert served.http.post("/v1/completions", json={"prompt": "x"}).status_code == 503
    connection.close()


def test_metrics(served: Any) -> None:
    served.openai.completions.create(model="tiny", prompt=PROMPT, max_tokens=5)
    text = served.http.get("/metrics").text
    for line in (
        "oasis_tp:num_requests_running 0.0",
        "oasis_tp:kv_cache_usage_perc 0.25",
        "oasis_tp:generation_tokens_total 5.0",
        "oasis_tp:hot_block_hits_total 7.0",
        "oasis_tp:spec_decode_num_drafts_total 1.0",
        "oasis_tp:hot_block_misses_total 3.0",
        'oasis_tp:prefetch_blocks_total{outcome="used"} 6.0',
        'oasis_tp:prefetch_blocks_total{outcome="late"} 1.0',
        'oasis_tp:prefetch_blocks_total{outcome="wasted"} 2.0',
        "oasis_tp:copy_stall_seconds_total 0.5",
        "oasis_tp:corrupted_requests_total 0.0",
        "oasis_tp:missed_mass_count 1.0",
        'oasis_tp:missed_mass_bucket{le="0.01"} 1.0',
        "oasis_tp:time_to_first_token_seconds_count 1.0",
        "oasis_tp:inter_token_latency_seconds_count 4.0",
        "oasis_tp:e2e_request_latency_seconds_count 1.0",
        'oasis_tp:request_success_total{finished_reason="length"} 1.0',
        'oasis_tp:request_success_total{finished_reason="abort"} 0.0',
    ):
        assert line in text.splitlines(), line
