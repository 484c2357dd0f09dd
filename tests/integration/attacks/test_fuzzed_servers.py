"""Random requests to three servers in processes of their own: no 5xx, no hang, a good neighbour's answers, memory that stays.

`HONE_FUZZ_EXAMPLES=20000 pytest -s` sends more of them, and prints the figures. A request that was once answered wrongly is a test below.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.forked_python import Forks
from support.fuzz import Client, Json, Request, Watched, fuzzing, requests, routes_of
from support.serve import listening, serving
from support.tiny_runs import make_model
from support.viewer_runs import write_run

from hone.agents.serving.app import Endpoint
from hone.apps.lab.viewer.server import Viewer
from hone.apps.tinker import wire
from hone.apps.tinker.app import TrainingEndpoint

pytestmark = pytest.mark.long(
    "hone/agents/serving", "hone/apps/tinker", "hone/apps/lab/viewer", "hone/generation/native", "hone/cli/serve.py"
)
JSON = {"Content-Type": "application/json"}
GROWTH = 200
"""MB that a server may grow by under a thousand requests: caches that fill, adapters that hostile clients create."""
Routes = dict[str, list[Json]]


def good(method: str, path: str, body: Json, **headers: str) -> Request:
    return Request(method, path, json.dumps(body).encode(), JSON | headers)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("fuzz") / "tiny")


def check(watched: Watched, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with capsys.disabled():
        sys.stdout.write(f"\n{name}: {watched.report()}\n")
    assert watched.memory[-1] - watched.memory[0] < GROWTH, watched.memory


# hone serve -----------------------------------------------------------------------------------------------------------

QUESTION = {"role": "user", "content": "Is it sunny?"}
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
FUNCTION = {"name": "weather", "description": "of a city", "parameters": PARAMETERS}
CALL = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
CALLED = [QUESTION, {"role": "assistant", "content": None, "tool_calls": [CALL]}, {"role": "tool", "tool_call_id": "c", "content": "5"}]  # fmt: skip
SAMPLING = {"model": "tiny", "max_tokens": 6, "temperature": 0.7, "top_p": 0.9, "seed": 3}
TEXT: list[Json] = [
    {**SAMPLING, "prompt": "One and", "logprobs": 2, "n": 2, "stop": ["x"], "logit_bias": {"5": 1.0}},
    {**SAMPLING, "prompt": [[5, 6], [7]], "echo": True, "top_k": 5, "min_p": 0.1, "repetition_penalty": 1.2},
    {**SAMPLING, "prompt": "a", "stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True},
    {**SAMPLING, "prompt": "a", "structured_outputs": {"regex": "[ab]{1,3}"}},
    {**SAMPLING, "prompt": "a", "guided_choice": ["yes", "no"], "stop_token_ids": [3], "prompt_logprobs": 1},
    {**SAMPLING, "prompt": "a", "guided_grammar": 'root ::= "a" | "b" root'},
]
CHAT: list[Json] = [
    {**SAMPLING, "messages": [{"role": "system", "content": "Be brief."}, QUESTION], "logprobs": True, "top_logprobs": 2},
    {**SAMPLING, "messages": CALLED, "tools": [{"type": "function", "function": FUNCTION}], "tool_choice": "auto"},
    {**SAMPLING, "messages": [QUESTION], "stream": True, "tools": [{"type": "function", "function": FUNCTION}],
     "tool_choice": {"type": "function", "function": {"name": "weather"}}},
    {**SAMPLING, "messages": [QUESTION], "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": PARAMETERS}}},
    {**SAMPLING, "messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}], "chat_template_kwargs": {"enable_thinking": False}},
    {**SAMPLING, "messages": [QUESTION, {"role": "assistant", "content": "It"}], "continue_final_message": True, "add_generation_prompt": False},
]  # fmt: skip
RESPOND: list[Json] = [
    {"model": "tiny", "input": "a", "max_output_tokens": 5, "instructions": "Be brief.", "metadata": {"a": "b"}},
    {"model": "tiny", "max_output_tokens": 5, "stream": True, "tools": [{"type": "function", **FUNCTION}], "tool_choice": "auto",
     "input": [{**QUESTION, "type": "message"}, {"type": "function_call", "call_id": "c", "name": "weather", "arguments": "{}"},
               {"type": "function_call_output", "call_id": "c", "output": "5"}]},
    {"model": "tiny", "input": "a", "max_output_tokens": 5, "text": {"format": {"type": "json_schema", "name": "a", "schema": PARAMETERS}},
     "reasoning": {"effort": "low"}, "include": ["message.output_text.logprobs"], "previous_response_id": "resp_1"},
]  # fmt: skip
MESSAGES: list[Json] = [
    {"model": "tiny", "max_tokens": 5, "messages": [QUESTION], "system": [{"type": "text", "text": "a"}], "stop_sequences": ["x"], "top_k": 3},
    {"model": "tiny", "max_tokens": 5, "stream": True, "tools": [{"name": "weather", "input_schema": PARAMETERS}], "tool_choice": {"type": "auto"},
     "thinking": {"type": "enabled", "budget_tokens": 1024}, "messages": [
         QUESTION, {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "weather", "input": {"city": "Rome"}}]},
         {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": "5"}]}]}]},
]  # fmt: skip
API: Routes = {
    "GET /v1/models": [{}],
    "GET /v1/models/{name:path}": [{"{name}": "tiny"}],
    "POST /v1/chat/completions": CHAT,
    "POST /v1/completions": TEXT,
    "POST /v1/responses": RESPOND,
    "GET /v1/responses/{response}": [{"{response}": "resp_1"}],
    "DELETE /v1/responses/{response}": [{"{response}": "resp_1"}],
    "POST /v1/messages": MESSAGES,
    "POST /v1/messages/count_tokens": MESSAGES,
}
SERVE: Routes = {
    **API,
    **{
        route.replace(" ", " /sessions/{session}"): [{**one, "{session}": "one"} for one in all_good]
        for route, all_good in API.items()
    },
    "GET /health": [{}],
    "GET /version": [{}],
    "GET /metrics": [{}],
    "POST /tokenize": [{"prompt": "a b", "return_token_strs": True}, {"messages": CALLED, "model": "tiny"}],
    "POST /detokenize": [{"tokens": [5, 6, 7]}],
    "GET /tokenizer_info": [{}],
    "GET /replicas": [{}],
    "POST /replicas/{index:int}/drain": [{"{index}": 0}],
    "POST /replicas/{index:int}/admit": [{"{index}": 0}],
    "GET /release": [{}],
    "POST /release": [{"release": 1}],
    "GET /sessions/{session}": [{"{session}": "one"}],
    "DELETE /sessions/{session}": [{"{session}": "two"}],
}


@pytest.fixture(scope="module")
def endpoint(model: Path, forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    log = tmp_path_factory.mktemp("serve") / "log"
    with serving(forks, model, log, "--max-model-len", "512") as address:
        client = Client(address)

        def ask() -> object:
            texts = []
            for path, body in (("completions", TEXT[0]), ("chat/completions", CHAT[0])):
                status, content = client.send(good("POST", f"/v1/{path}", body))
                assert status == 200, content
                texts += [one.get("text") or one["message"]["content"] for one in json.loads(content)["choices"]]
            return texts  # the last digits of log-probs depend on what is computed at the same time

        with Watched(address, log, ask) as watched:
            yield watched


@fuzzing()
@given(request_=requests(SERVE, JSON))
def fuzz_endpoint(endpoint: Watched, request_: Request) -> None:
    endpoint.send(request_)


def test_random_requests_to_the_endpoint(endpoint: Watched, capsys: pytest.CaptureFixture[str]) -> None:
    fuzz_endpoint(endpoint)
    check(endpoint, "hone serve", capsys)


# hone serve --train ---------------------------------------------------------------------------------------------------

SHAPE = {"rank": 2, "train_attn": True, "train_mlp": False, "train_unembed": False, "seed": 1}
PROMPT = {"chunks": [{"type": "encoded_text", "tokens": [5, 6, 7]}]}
SAMPLED = {"max_tokens": 4, "temperature": 1.0, "top_p": 0.9, "top_k": 4, "seed": 2, "stop": [3]}
SAMPLE = {"base_model": "tiny", "prompt": PROMPT, "sampling_params": SAMPLED, "num_samples": 2, "prompt_logprobs": True, "topk_sample_logprobs": 2}  # fmt: skip
MODEL = "fuzz:train:0"
SAVED = f"tinker://{MODEL}/weights/first"
NEXT: Json = "the next number"
"""In place of the number of an operation, which the attacker counts."""
TRAIN: Routes = {
    "GET /api/v1/healthz": [{}],
    "GET /api/v1/get_server_capabilities": [{}],
    "GET /api/v1/samplers/{name}": [{"{name}": "sampling-1-00000000"}],
    "GET /api/v1/training_runs/{model}": [{"{model}": MODEL}],
    "DELETE /api/v1/training_runs/{model}/checkpoints/{kind}/{name}": [{"{model}": MODEL, "{kind}": "sampler_weights", "{name}": "now"}],
    "POST /api/v1/client/config": [{}],
    "POST /api/v1/client/dynamic_config": [{}],
    "POST /api/v1/telemetry": [{"events": []}],
    "POST /api/v1/create_session": [{"tags": [], "sdk_version": "1"}],
    "POST /api/v1/session_heartbeat": [{"session_id": "fuzz"}],
    "POST /api/v1/create_model": [{"session_id": "fuzz", "model_seq_id": 1, "base_model": "tiny", "lora_config": SHAPE}],
    "POST /api/v1/get_info": [{"model_id": MODEL}],
    "POST /api/v1/unload_model": [{"model_id": "fuzz:train:1"}],
    "POST /api/v1/optim_step": [{"model_id": MODEL, "seq_id": NEXT, "adam_params": {
        "learning_rate": 1e-4, "beta1": 0.9, "beta2": 0.95, "eps": 1e-12, "weight_decay": 0.1, "grad_clip_norm": 1.0}}],
    "POST /api/v1/save_weights": [{"model_id": MODEL, "seq_id": NEXT, "path": "first", "overwrite": True}],
    "POST /api/v1/save_weights_for_sampler": [{"model_id": MODEL, "seq_id": NEXT, "path": "now"}, {"model_id": MODEL, "seq_id": NEXT}],
    "POST /api/v1/load_weights": [{"model_id": MODEL, "seq_id": NEXT, "path": SAVED, "optimizer": True},
                                  {"session_id": "fuzz", "model_seq_id": 2, "path": SAVED, "base_model": "tiny"}],
    "POST /api/v1/create_sampling_session": [{"base_model": "tiny", "model_path": SAVED}],
    "POST /api/v1/weights_info": [{"tinker_path": SAVED}],
    "POST /api/v1/sessions/{session}/finish": [{"{session}": "fuzz"}],
    "POST /api/v1/asample": [SAMPLE, {**SAMPLE, "sampling_session_id": "sampling-1", "seq_id": 1}, {**SAMPLE, "model_path": SAVED}],
    "POST /api/v1/cancel_future": [{"request_id": "sample-1"}],
    "POST /api/v1/retrieve_future": [{"request_id": "fuzz:train:0"}],
    "POST /api/v1/forward_backward": [{}],
}  # fmt: skip


def passing(model_id: str, number: int, **changes: Any) -> Request:
    """A forward pass, and a backward pass unless ``forward_only``, as protobuf.

    Args:
        changes: fields of the request; ``tokens`` and ``targets`` of its datum, and ``inputs`` by name as bytes and dtype.
    """
    message = wire.parse_forward_backward(b"")
    message.model_id, message.seq_id = model_id, number
    message.loss_fn = changes.get("loss", "cross_entropy")
    message.forward_only = changes.get("forward_only", False)
    datum = message.data.add()
    datum.model_input.add().encoded_text.tokens = changes.get("tokens", bytes([5, 0, 0, 0, 6, 0, 0, 0]))
    inputs = {
        "target_tokens": (changes.get("targets", bytes([6, *[0] * 7, 7, *[0] * 7])), 2),
        **changes.get("inputs", {}),
    }
    for name, (dense, dtype) in inputs.items():
        entry = datum.loss_fn_inputs.add(key=name)
        entry.value.dense, entry.value.dtype = dense, dtype
    for name, value in changes.get("settings", {}).items():
        message.loss_fn_config.add(key=name, value=value)
    body = bytearray(message.SerializeToString())
    for place, byte in changes.get("damage", ()):
        body[place % len(body)] = byte
    return Request("POST", "/api/v1/forward_backward", bytes(body), {"X-API-Key": "fuzz"})


PASSES = st.fixed_dictionaries(
    {},
    optional={
        "loss": st.sampled_from(["ppo", "dro", "importance_sampling", "cispo", "", "x"]),
        "forward_only": st.booleans(),
        "tokens": st.binary(max_size=12) | st.just(b"\xff\xff\xff\x7f" * 2) | st.just(bytes([5, 0, 0, 0]) * 600),
        "targets": st.binary(max_size=17),
        "inputs": st.dictionaries(
            st.sampled_from(["weights", "logprobs", "advantages", "target_tokens", ""]),
            st.tuples(st.just(b"\0\0\x80\x7f" * 2) | st.just(b"\0" * 8) | st.binary(max_size=17), st.integers(0, 3)),
        ),
        "settings": st.dictionaries(st.sampled_from(["beta", "clip_low_threshold", "x"]), st.floats()),
        "damage": st.lists(st.tuples(st.integers(0, 200), st.integers(0, 255)), max_size=3),
    },
)


class Trainer:
    """An attacker of the training service, which knows the protocol: numbers of operations, and results that are fetched."""

    def __init__(self, watched: Watched) -> None:
        self._watched, self.number = watched, 1
        self.outcome(watched.send(good("POST", "/api/v1/create_model", {**TRAIN["POST /api/v1/create_model"][0], "model_seq_id": 0})))  # fmt: skip
        self.send(good("POST", "/api/v1/save_weights", TRAIN["POST /api/v1/save_weights"][0]))

    def send(self, request: Request, **more: Any) -> None:
        """Send a request; the next operation of the model has the next number."""
        mine = request.body is not None and json.dumps(NEXT).encode() in request.body
        body = (request.body or b"").replace(json.dumps(NEXT).encode(), str(self.number).encode())
        sent = Request(request.method, request.path, body if request.body is not None else None, request.headers)
        answer = self._watched.send(sent)
        if mine or sent.path.endswith(("asample", "create_model")):
            self.outcome(answer)

    def train(self, changes: dict[str, Any]) -> None:
        """Send a pass, which may be damaged so that it is another model's or another number."""
        answer = self._watched.send(passing(MODEL, self.number, **changes))
        if not changes.get("damage"):
            self.outcome(answer)

    def outcome(self, answer: tuple[int, bytes]) -> None:
        """Fetch the result of a request that was accepted; it may be refused, but for a reason of the client's."""
        try:
            name = json.loads(answer[1])["request_id"]
        except (ValueError, KeyError, TypeError):
            return
        if re.fullmatch(rf"{MODEL}:{self.number}", str(name)):
            self.number += 1
        elif str(name).startswith(f"{MODEL}:"):
            return  # it waits for operations before it
        _, content = self._watched.send(good("POST", "/api/v1/retrieve_future", {"request_id": name}))
        assert b'"category":"server"' not in content and b"try_again" not in content, content[:2000]


@pytest.fixture(scope="module")
def service(model: Path, forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    folder = tmp_path_factory.mktemp("train")
    words = ["serve", model, "--train", "--port", "0", "--max-model-len", "256", "--out", folder / "weights"]
    with listening([forks.bin / "hone", *words], folder / "log") as address:
        client, numbers = Client(address), iter(range(1, 10**9))

        def result(request: Request) -> bytes:
            name = json.loads(client.send(request)[1])["request_id"]
            return client.send(good("POST", "/api/v1/retrieve_future", {"request_id": name}))[1]

        shape = {**TRAIN["POST /api/v1/create_model"][0], "session_id": "neighbour"}
        assert b"neighbour:train:1" in result(good("POST", "/api/v1/create_model", shape))

        def ask() -> object:
            sampled = result(good("POST", "/api/v1/asample", SAMPLE))
            return sampled, result(passing("neighbour:train:1", next(numbers), forward_only=True))

        with Watched(address, folder / "log", ask) as watched:
            yield watched


@fuzzing()
@given(request_=requests(TRAIN, JSON) | PASSES)
def fuzz_service(trainer: Trainer, request_: Any) -> None:
    trainer.send(request_) if isinstance(request_, Request) else trainer.train(request_)


def test_random_requests_to_the_training_service(service: Watched, capsys: pytest.CaptureFixture[str]) -> None:
    fuzz_service(Trainer(service))
    check(service, "hone serve --train", capsys)


# hone view ------------------------------------------------------------------------------------------------------------

SEQUENCE = {"run": "run", "kind": "rollouts", "step": 1, "uid": "train:0", "index": 0, "part": 0}
LIST = {
    "run": "run",
    "kind": "rollouts",
    "q": "score<0.5 stop:length -tools apples",
    "sort": "-score",
    "offset": 0,
    "limit": 5,
}
VIEW: Routes = {
    "GET /": [{}, {"token": "wrong"}],
    "GET /{path:path}": [{"{path}": "app.js"}],
    **{f"GET /api/{name}": [{"run": "run"}] for name in ("runs", "summaries", "state", "overview", "alerts", "config", "metrics", "questions")},
    **{f"GET /api/{name}": [LIST, {**LIST, "q": "", "sort": "step"}] for name in ("groups", "answers", "prompts")},
    **{f"GET /api/{name}": [SEQUENCE] for name in ("group", "tokens", "factors", "episode")},
    "GET /api/timeline": [{"run": "run", "step": 1}],
    "GET /api/image": [{"run": "run", "name": "0123456789abcdef"}],
    "GET /api/prompt": [{"run": "run", "source": "agents", "row": 0, "uid": "train:0"}],
    "GET /api/count": [{"run": "run", "question": "longer"}],
    "GET /api/compare": [{"run_a": "run", "run_b": "run", "q_a": "score>0", "q_b": "is:longer", "kind": "rollouts"}],
    "GET /api/labels": [{"run": "run", "kind": "rollouts"}],
    "GET /api/selection": [{"run": "run", "q": "score>0", "form": "sft"}, {"run": "run", "q": "", "form": "pairs"}],
    "POST /api/label": [{**SEQUENCE, "label": "good", "comment": "a comment"}],
    "POST /api/rescore": [{"run": "run", "reward": "gsm8k"}],
}  # fmt: skip


@pytest.fixture(scope="module")
def viewer(forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Watched, dict[str, str]]]:
    folder = tmp_path_factory.mktemp("view")
    run = write_run(folder / "run", steps=3)
    words = ["view", run, "--port", "0", "--token", "secret", "--no-browser"]
    with listening([forks.bin / "hone", *words], folder / "log") as address:
        cookie = {"Cookie": f"hone_view_{address.rpartition(':')[2]}=secret", "X-Hone-View": "1"}
        client = Client(address)
        while b'"reading":true' in client.send(Request("GET", "/api/state", None, cookie))[1]:
            time.sleep(0.1)  # until the columns are read, its answers are about the newest steps

        def ask() -> object:
            paths = ("groups?q=apples", "group?step=1&uid=train:0", "tokens?step=1&uid=train:0&index=0", "metrics")
            return [client.send(Request("GET", f"/api/{path}", None, cookie)) for path in paths]

        with Watched(address, folder / "log", ask) as watched:
            yield watched, cookie


def test_random_requests_to_the_viewer(
    viewer: tuple[Watched, dict[str, str]], capsys: pytest.CaptureFixture[str]
) -> None:
    watched, cookie = viewer

    @fuzzing()
    @given(request_=requests(VIEW, JSON | cookie))
    def fuzz(request_: Request) -> None:
        watched.send(request_)

    fuzz()
    check(watched, "hone view", capsys)


# ----------------------------------------------------------------------------------------------------------------------


def test_every_route_is_fuzzed() -> None:
    nothing: Any = SimpleNamespace(gateway=SimpleNamespace(metrics=None))
    endpoint = Endpoint(nothing).app._app._app
    viewed = Viewer(nothing, "token").app
    trained = TrainingEndpoint(nothing, nothing, token=None).app
    for app, routes in ((endpoint, SERVE), (trained, TRAIN), (viewed, VIEW)):
        assert routes_of(app.routes) == routes.keys()
