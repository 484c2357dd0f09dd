"""Teachers behind a server: `hone serve` and vLLM's own give what the teacher's weights give, or one message."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import signal
import subprocess
import threading
import time
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from support.backend_cases import CPU
from support.engine_cases import byte_tokenizer, save
from support.engine_cases import make_model as make_engine_model
from support.forked_python import Forks
from support.launch import Command, set_environment
from support.models import random_batch
from support.patience import LONG
from support.serve import serving
from support.services import free_port
from support.tiny_runs import make_model, make_tiny_runs, rl_words

from hone.cluster.context import WorkerContext
from hone.cluster.teacher import TeacherWorker
from hone.config import RLConfig, load_config
from hone.config.distillation import DistillationConfig, TeacherServerConfig
from hone.data.batch import Batch
from hone.data.ragged import Ragged
from hone.data.tokenizer import load_tokenizer
from hone.errors import ConfigError
from hone.generation.environments import interpreter_of
from hone.models.teacher import IDS, LOG_PROBS, TEACHER, TEACHER_LOG_PROBS
from hone.training.served_teacher import ServedTeacher, ServedTeachers, TeacherError

pytestmark = pytest.mark.application(
    "hone/training/served_teacher.py",
    "hone/algorithms/distillation.py",
)

BLOCK = "distillation"
K = 5
KEY = "a key"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    make_tiny_runs(folder)
    make_model(folder / "teacher", layers=1)
    return folder


@pytest.fixture(scope="module")
def served(tiny: Path, forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of the teacher."""
    with serving(forks, tiny / "teacher", tmp_path_factory.mktemp("serve") / "log", token=KEY) as url:
        yield f"{url}/v1"


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEACHER_KEY", KEY)


def settings(*paths: str, mode: str = "reverse_kl_topk", **keys: Any) -> DistillationConfig:
    server = TeacherServerConfig(api_key_env="TEACHER_KEY", retries=1, **keys)
    teachers = {f"source{number}": path for number, path in enumerate(paths)}
    return DistillationConfig(enable=True, teachers=teachers, loss_mode=mode, topk=K, server=server)


def rows() -> Batch:
    batch = random_batch(6, 5, group=2)
    return batch.with_columns(**{TEACHER: torch.tensor([0, 1, 0, 1, 1, 0])})


def of_weights(tiny: Path, distillation: list[str], batch: Batch) -> Batch:
    config = load_config(
        RLConfig, [f"actor_rollout_ref.model.path={tiny}/model", f"{BLOCK}.enable=true", f"{BLOCK}.topk={K}", *distillation]
    )  # fmt: skip
    return TeacherWorker(WorkerContext(config, CPU)).teach(batch)


def assert_same(found: Batch, expected: Batch, mode: str) -> None:
    """Columns agree within 1e-4; likeliest tokens where their log-probs are not equal."""
    if mode == "k1":
        torch.testing.assert_close(
            found.ragged(TEACHER_LOG_PROBS).values, expected.ragged(TEACHER_LOG_PROBS).values, atol=1e-4, rtol=0
        )
        return
    one, other = (columns.ragged(LOG_PROBS).values for columns in (found, expected))
    torch.testing.assert_close(one, other, atol=1e-4, rtol=0)
    same = found.ragged(IDS).values == expected.ragged(IDS).values
    assert found.ragged(IDS).values.dtype == expected.ragged(IDS).values.dtype
    assert same.float().mean() > 0.98


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["k1", "reverse_kl_topk"])
def test_a_server_gives_the_columns_of_the_weights(tiny: Path, served: str, mode: str) -> None:
    batch = rows()
    said = asyncio.run(
        ServedTeachers(settings(served, mode=mode), 10**6).columns(batch.select("uid", "prompt_ids", "response_ids"))
    )
    expected = of_weights(tiny, [f"{BLOCK}.path={tiny}/teacher", f"{BLOCK}.loss_mode={mode}"], batch)
    assert_same(said, expected, mode)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["k1", "reverse_kl_topk"])
def test_one_teacher_is_served_and_one_is_not(tiny: Path, served: str, mode: str) -> None:
    """Rows of the server are NaN until it has answered."""
    batch = rows()
    mixed = f"{BLOCK}.teachers={{source0: '{served}', source1: '{tiny}/model'}}"
    local = of_weights(tiny, [mixed, f"{BLOCK}.loss_mode={mode}"], batch)
    column = TEACHER_LOG_PROBS if mode == "k1" else LOG_PROBS
    missing = [bool(local.ragged(column).row(row).isnan().all()) for row in range(len(batch))]
    assert missing == [True, False, True, False, False, True]
    found = asyncio.run(
        ServedTeachers(settings(served, f"{tiny}/model", mode=mode), 10**6).columns(batch.updated(local))
    )
    both = f"{BLOCK}.teachers={{source0: '{tiny}/teacher', source1: '{tiny}/model'}}"
    assert_same(found, of_weights(tiny, [both, f"{BLOCK}.loss_mode={mode}"], batch), mode)


@pytest.mark.slow
def test_a_run_learns_the_same_from_a_server(tiny: Path, served: str, tmp_path: Path) -> None:
    words = ("--preset=opd", "actor_rollout_ref.rollout.n=2", "data.train_batch_size=4", f"{BLOCK}.loss_mode=forward_kl_topk",
             "actor_rollout_ref.actor.ppo_mini_batch_size=4", "trainer.total_training_steps=3")  # fmt: skip
    metrics = []
    for name, teacher in (("weights", f"{tiny}/teacher"), ("server", served)):
        run = tmp_path / name
        given = [w for w in rl_words(tiny, run, *words, f"{BLOCK}.path={teacher}") if "custom_reward_function" not in w]
        given += [f"{BLOCK}.server.api_key_env=TEACHER_KEY"] if name == "server" else []
        ended = Command(
            given, run.with_suffix(".log"), tiny, functools.partial(set_environment, {"TEACHER_KEY": KEY})
        ).wait()
        assert ended.code == 0, ended.output
        metrics.append([json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()])
    for one, other in zip(*metrics, strict=True):
        for key in ("distillation/loss", "distillation/teacher_mass", "actor/grad_norm"):
            assert other[key] == pytest.approx(one[key], abs=1e-4), key


@pytest.mark.slow
def test_a_sound_server_passes_and_another_tokenizer_does_not(
    tiny: Path, served: str, forks: Forks, tmp_path: Path
) -> None:
    server = settings(served).server
    policy = load_tokenizer(str(tiny / "model"))
    asyncio.run(ServedTeacher(served, server).check(policy, K, 32))
    with pytest.raises(TeacherError, match="reads at most"):
        asyncio.run(ServedTeacher(served, server).check(policy, K, 10**6))
    with pytest.raises(TeacherError, match="has the models teacher, not 'other'"):
        asyncio.run(ServedTeacher(f"{served}#other", server).check(policy, K, 32))
    with pytest.raises(TeacherError, match="401"):
        asyncio.run(
            ServedTeacher(served, TeacherServerConfig(api_key_env="NO_SUCH_KEY", retries=0)).check(policy, K, 32)
        )
    swapped = _swapped(tiny / "teacher", tmp_path / "swapped")
    with pytest.raises(TeacherError, match="another tokenizer"):
        asyncio.run(ServedTeacher(served, server).check(load_tokenizer(str(swapped)), K, 32))


def _swapped(model: Path, folder: Path) -> Path:
    """Copy a tokenizer with the ids of two tokens exchanged."""
    folder.mkdir()
    for file in model.glob("*token*"):
        (folder / file.name).write_bytes(file.read_bytes())
    data = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = data["model"]["vocab"]
    vocabulary["1"], vocabulary["2"] = vocabulary["2"], vocabulary["1"]
    (folder / "tokenizer.json").write_text(json.dumps(data))
    return folder


class _Faulty(BaseHTTPRequestHandler):
    """A server that answers the completions of :attr:`answers` in turn."""

    answers: list[tuple[int, Any]] = []
    calls = 0

    def do_GET(self) -> None:
        self._answer(200, {"data": [{"id": "m"}]})

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        kind = type(self)
        kind.calls += 1
        self._answer(*kind.answers[min(kind.calls, len(kind.answers)) - 1])

    def _answer(self, status: int, body: Any) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *arguments: Any) -> None:
        del arguments


@pytest.fixture
def faulty() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Faulty)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    _Faulty.calls = 0
    yield f"http://127.0.0.1:{server.server_port}/v1"
    server.shutdown()


def _completion(*places: dict[str, float] | None) -> tuple[int, Any]:
    named = [place and {t: {"logprob": v} for t, v in place.items()} for place in places]
    return 200, {"choices": [{"prompt_logprobs": named}]}


TWO = Batch({"prompt_ids": Ragged.from_rows([[1]]), "response_ids": Ragged.from_rows([[2]])})


def test_a_busy_server_is_asked_again_and_never_counts_as_zeros(faulty: str) -> None:
    _Faulty.answers = [(503, {}), _completion(None, {"2": -0.5, "3": -1.0})]
    teachers = ServedTeachers(settings(faulty, mode="k2"), 10)
    assert asyncio.run(teachers.columns(TWO)).ragged(TEACHER_LOG_PROBS).values.tolist() == [-0.5]
    _Faulty.answers = [(503, {})]
    before = _Faulty.calls
    with pytest.raises(TeacherError, match="status 503.*2 times"):
        asyncio.run(teachers.columns(TWO))
    assert _Faulty.calls == before + 2


@pytest.mark.parametrize(
    ("answer", "problem"),
    {
        "no field": ((200, {"choices": [{"text": "x"}]}), "no log-probs of a prompt's tokens"),
        "too few places": (_completion(None), "no log-probs of a prompt's tokens"),
        "too few tokens": (_completion(None, {"2": -0.5, "3": -1.0}), "2 tokens at a place, of 5"),
        "not the token": (_completion(None, {"3": -0.5}), "no log-prob of token 2"),
        "foreign ids": (_completion(None, {str(n): -float(n) for n in range(2, 12)}), "an id that the policy does not have"),
        "refused": ((400, {"error": "max_logprobs is 20"}), "max_logprobs is 20"),
    }.values(),
)  # fmt: skip
def test_an_unusable_answer_is_one_message(faulty: str, answer: tuple[int, Any], problem: str) -> None:
    _Faulty.answers = [answer]
    with pytest.raises(TeacherError, match=problem):
        asyncio.run(ServedTeachers(settings(faulty), 5).columns(TWO))


@pytest.fixture(scope="module")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """Address of vLLM's own server, and its model."""
    try:
        python = Path(interpreter_of("vllm"))
    except ConfigError as missing:
        pytest.skip(missing.what)
    folder = tmp_path_factory.mktemp("vllm")
    model = save(make_engine_model("tied"), folder / "model")
    options = ["--dtype=float32", "--max-model-len=128", "--enforce-eager", f"--max-logprobs={K}", f"--api-key={KEY}"]
    program = [str(python), "-m", "vllm.entrypoints.openai.api_server"]
    command = [*program, f"--model={model}", f"--port={(port := free_port())}", "--host=127.0.0.1", *options]
    variables = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    variables |= {"PATH": f"{python.parent}:{os.environ['PATH']}"}
    log = folder / "log"
    with log.open("w") as file:
        server = subprocess.Popen(
            command, stdout=file, stderr=file, env={**os.environ, **variables}, start_new_session=True
        )
    try:
        deadline = time.monotonic() + 10 * LONG
        while not _answers(f"http://127.0.0.1:{port}/health"):
            assert server.poll() is None and time.monotonic() < deadline, log.read_text()[-5000:]
            time.sleep(0.5)
        yield f"http://127.0.0.1:{port}/v1", model
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGTERM)
        server.wait(60)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=1):
            return True
    except OSError:
        return False


@pytest.mark.engines
@pytest.mark.parametrize("mode", ["k1", "reverse_kl_topk"])
def test_vllm_gives_the_columns_of_the_weights(vllm: tuple[str, Path], mode: str) -> None:
    address, model = vllm
    asyncio.run(ServedTeacher(address, settings(address).server).check(byte_tokenizer(), K, 100))
    with pytest.raises(TeacherError, match="max allowed|max_logprobs"):
        asyncio.run(ServedTeacher(address, settings(address).server).check(byte_tokenizer(), K + 1, 100))
    batch = rows().select("prompt_ids", "response_ids")
    said = asyncio.run(ServedTeachers(settings(address, mode=mode), 10**6).columns(batch))
    local = load_config(
        RLConfig,
        [f"actor_rollout_ref.model.path={model}", f"{BLOCK}.enable=true", f"{BLOCK}.topk={K}", f"{BLOCK}.path={model}", f"{BLOCK}.loss_mode={mode}"],
    )  # fmt: skip
    assert_same(said, TeacherWorker(WorkerContext(local, CPU)).teach(batch), mode)
