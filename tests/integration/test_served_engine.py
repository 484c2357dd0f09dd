"""An engine in a process of its own: how it begins, how it ends, who may use it, and what is said when something is wrong."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch
from support.engine_cases import assert_greedy, collect, make_model, plan, requests, save, serve
from support.messages import raises
from support.patience import SOON
from typer.testing import CliRunner

from hone.cli.engines import app, run_server
from hone.config.rollout import RolloutConfig
from hone.errors import ConfigError, GenerationError
from hone.generation.environments import RECIPES, install, interpreter_of
from hone.generation.options import engine_options
from hone.generation.protocol import SamplingParams
from hone.generation.remote import EngineProcess, ServedEngine
from hone.generation.remote.engine import TOKEN_VARIABLE, parse_url
from hone.generation.remote.process import log_errors, suggested_fix

long = pytest.mark.long("hone/generation/remote", "hone/generation/server")

GREEDY = SamplingParams(max_tokens=8, temperature=0.0)


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    return save(make_model("tied"), tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def server(path, tmp_path_factory):
    process = EngineProcess(plan("served", path, tmp_path_factory.mktemp("log") / "engine.log"), "a secret")
    yield process
    process.kill()


@pytest.fixture
def url(server, monkeypatch) -> str:
    monkeypatch.setenv(TOKEN_VARIABLE, "a secret")
    return f"tcp://127.0.0.1:{server.port}"


# attaching -----------------------------------------------------------------------------------------------------------


@long
@pytest.mark.parametrize("backend", ["shared_memory", "file", "socket"])
def test_weights_arrive_by_every_transport_and_in_many_buckets(url, backend):
    new = make_model("tied", seed=5 + len(backend))
    engine = ServedEngine.attach(url, backend=backend, bucket_bytes=20_000)
    try:
        asyncio.run(engine.load_weights(new.named_parameters(), 1))
        asked = requests(GREEDY, 2)
        done = serve(engine, asked)
        for one in asked:
            assert_greedy(new, one, done[one.request_id])
    finally:
        engine.close()


@long
def test_two_clients_do_not_disturb_each_other(url):
    one, other = ServedEngine.attach(url), ServedEngine.attach(url)
    try:
        asked = requests(SamplingParams(max_tokens=120, temperature=0.0, ignore_eos=True), 3)

        async def both():
            mine = asyncio.create_task(collect(one, asked))
            theirs = asyncio.create_task(collect(other, requests(GREEDY, 3)))
            await asyncio.sleep(0.05)
            await other.abort()
            return await mine, await theirs

        mine, theirs = asyncio.run(both())
        assert all(len(got.token_ids) == 120 for got in mine.values()), "the other's abort is not mine"
        assert len(theirs) == 3
    finally:
        one.close()
        other.close()


@long
def test_a_client_that_hangs_up_leaves_the_engine_to_the_others(url):
    leaving, staying = ServedEngine.attach(url), ServedEngine.attach(url)
    try:
        for number in range(20):
            message = requests(SamplingParams(max_tokens=150), 1)[0]
            fields = {**vars(message), "sampling": vars(message.sampling), "progress": None, "request_id": str(number)}
            leaving._connection.ask("generate", request=fields)
        leaving.close()
        assert len(serve(staying, requests(GREEDY, 2))) == 2
    finally:
        staying.close()


@long
def test_a_wrong_token_is_refused(url, monkeypatch):
    monkeypatch.setenv(TOKEN_VARIABLE, "a guess")
    with raises(ConfigError, "token", where="actor_rollout_ref.rollout.engine_url"):
        ServedEngine.attach(url)


def test_another_server_than_an_engine_is_refused(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as web:
        port = web.getsockname()[1]

        def answer() -> None:
            client, _ = web.accept()
            client.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            client.close()

        import threading

        threading.Thread(target=answer, daemon=True).start()
        with raises(ConfigError, f"127.0.0.1:{port}", "hone engines serve"):
            ServedEngine.attach(f"tcp://127.0.0.1:{port}")
    with raises(ConfigError, f"127.0.0.1:{port}", "hone engines serve"):
        ServedEngine.attach(f"tcp://127.0.0.1:{port}")


@pytest.mark.parametrize(
    "wrong", ["http://127.0.0.1:80", "127.0.0.1:80", "tcp://127.0.0.1", "tcp://h:port", "tcp://h:1/v1", ""]
)
def test_an_address_of_another_kind_is_refused(wrong):
    with raises(ConfigError, f"'{wrong}'", "tcp://HOST:PORT"):
        parse_url(wrong)


# start ---------------------------------------------------------------------------------------------------------------


def test_an_engine_that_is_not_installed_says_how_to_install_it(monkeypatch, tmp_path):
    monkeypatch.setenv("HONE_ENGINES", str(tmp_path))
    with raises(ConfigError, "vllm", "hone engines install vllm", where="actor_rollout_ref.rollout.name"):
        interpreter_of("vllm")
    with raises(ConfigError, "rollout.engine_env", "/not/there"):
        interpreter_of("vllm", "/not/there")


@long
def test_an_environment_without_the_engine_says_what_is_missing(path, tmp_path):
    wanted = dataclasses.replace(plan("served", path, tmp_path / "log"), engine="vllm")
    with raises(GenerationError, "No module named 'vllm'", "hone engines install"):
        EngineProcess(wanted)


@long
def test_a_missing_model_is_reported_with_the_engines_error(tmp_path):
    with raises(GenerationError, "nowhere"):
        EngineProcess(plan("served", tmp_path / "nowhere", tmp_path / "log"))


@long
def test_an_engine_that_takes_too_long_is_ended(path, tmp_path):
    slow = dataclasses.replace(plan("served", path, tmp_path / "log"), start_seconds=0.3)
    before = set(psutil.Process().children())
    with raises(GenerationError, "0 s", "rollout.engine_start_seconds=1200"):
        EngineProcess(slow)
    assert not [
        child
        for child in set(psutil.Process().children()) - before
        if child.status() != psutil.STATUS_ZOMBIE and "hone.generation.server" in " ".join(child.cmdline())
    ]


@long
def test_a_port_in_use_is_named(path, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        wanted = dataclasses.replace(plan("served", path, tmp_path / "log"), port=taken.getsockname()[1])
        with raises(ConfigError, f"127.0.0.1:{wanted.port}", "--port"):
            EngineProcess(wanted)


def test_arguments_for_another_engine_are_refused():
    with raises(ConfigError, "'sglang'", "'vllm'", where="actor_rollout_ref.rollout.engine_kwargs"):
        engine_options(RolloutConfig(name="vllm", engine_kwargs={"sglang": {"tp_size": 2}}))
    options = engine_options(
        RolloutConfig(name="vllm", max_num_batched_tokens=512, engine_kwargs={"vllm": {"block_size": 16}})
    )
    assert options["max_num_batched_tokens"] == 512 and options["block_size"] == 16 and "enforce_eager" not in options


def test_the_errors_of_a_log_are_extracted(tmp_path):
    log = tmp_path / "log"
    log.write_text("starting\n  File x\nValueError: No available memory for the cache blocks.\nmore\nbye\n")
    assert log_errors(log) == ["ValueError: No available memory for the cache blocks."]
    assert "max_cache_tokens" in suggested_fix("\n".join(log_errors(log)))
    log.write_text("\n".join(map(str, range(100))))
    assert log_errors(log)[-1] == "99"
    assert log_errors(tmp_path / "none") == []


def test_installing_checks_before_it_downloads(monkeypatch, tmp_path):
    with raises(ConfigError, "vlm", "vllm"):
        install("vlm", cpu=True, environment=tmp_path / "e", say=print)
    (tmp_path / "full").mkdir()
    (tmp_path / "full/thesis.txt").touch()
    with raises(ConfigError, tmp_path / "full", "hone engines install --env DIR"):
        install("vllm", cpu=True, environment=tmp_path / "full", say=print)
    monkeypatch.setitem(RECIPES, "vllm", dataclasses.replace(RECIPES["vllm"], megabytes=10**9))
    with raises(ConfigError, "1000000.0 GB", "hone engines install vllm --env DIR"):
        install("vllm", cpu=True, environment=tmp_path / "e", say=print)
    assert (tmp_path / "full/thesis.txt").exists() and not (tmp_path / "e").exists()


# ending --------------------------------------------------------------------------------------------------------------

DRIVER = """
import sys, time
from pathlib import Path
from support.engine_cases import plan
from hone.generation.remote import EngineProcess
process = EngineProcess(plan(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])))
print(process.pid, flush=True)
time.sleep(600)
"""


def processes_that_end_with_the_driver(kind: str, path: Path, log: Path) -> int:
    """Start a driver with an engine and kill the driver with SIGKILL; how many processes of the engine there were,
    all gone soon."""
    tests = str(Path(__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": tests}
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER, kind, str(path), str(log)], stdout=subprocess.PIPE, env=environment
    )
    assert driver.stdout is not None
    engine = psutil.Process(int(driver.stdout.readline()))
    family = [engine, *engine.children(recursive=True)]
    os.kill(driver.pid, signal.SIGKILL)
    driver.wait()
    psutil.wait_procs(family, timeout=SOON)
    left = [process for process in family if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]
    assert not left, left
    return len(family)


@long
def test_no_process_outlives_a_driver_that_is_killed(path, tmp_path):
    assert processes_that_end_with_the_driver("served", path, tmp_path / "log") >= 1


@pytest.fixture
def external(request) -> str:
    try:
        interpreter_of(request.param)
    except ConfigError as missing:
        pytest.skip(missing.what)
    return request.param


@pytest.mark.engines
@pytest.mark.parametrize("external", ["vllm", "sglang"], indirect=True)
def test_no_process_of_an_external_engine_outlives_a_driver_that_is_killed(external, path, tmp_path):
    assert processes_that_end_with_the_driver(external, path, tmp_path / "log") >= 2


@pytest.mark.engines
@pytest.mark.parametrize(
    ("external", "options", "mentions"),
    [
        ("vllm", {"blok_size": 32}, ("blok_size", "block_size")),
        ("vllm", {"max_num_seqs": -1}, ("max_num_seqs",)),
        ("sglang", {"tp_sise": 2}, ("tp_sise", "tp_size")),
        ("sglang", {"gc_threshold": [1, 2, 3, 4]}, ("gc_threshold",)),
    ],
    indirect=["external"],
)
def test_an_external_engine_checks_its_arguments(external, options, mentions, path, tmp_path):
    with raises(ConfigError, *mentions, where=f"actor_rollout_ref.rollout.engine_kwargs.{external}"):
        EngineProcess(plan(external, path, tmp_path / "log", **options))


@long
def test_closing_ends_the_process(path, tmp_path):
    engine = ServedEngine.start(plan("served", path, tmp_path / "log"))
    assert engine.process is not None
    pid = engine.process.pid
    torch.manual_seed(0)
    assert len(serve(engine, requests(GREEDY, 1))) == 1
    engine.close()
    assert not psutil.pid_exists(pid)


# the command ---------------------------------------------------------------------------------------------------------


@long
def test_a_server_of_the_command_line_can_be_attached_and_terminated(path, tmp_path, monkeypatch):
    monkeypatch.setenv(TOKEN_VARIABLE, "between us")
    words = ["serve", "native", "--model", str(path), "--max-model-len", "64", "--dtype", "float32"]
    command = [sys.executable, "-m", "hone.cli.main", "engines", *words, "--log", str(tmp_path / "engine.log")]
    served = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert served.stdout is not None
    address = served.stdout.readline().rsplit("engine_url=", 1)[1].strip()
    engine = ServedEngine.attach(address)
    assert len(serve(engine, requests(GREEDY, 2))) == 2
    children = psutil.Process(served.pid).children(recursive=True)
    served.terminate()
    assert served.wait(timeout=SOON) == 0 and children
    assert not psutil.wait_procs(children, timeout=SOON)[1]
    engine.close()


def test_a_server_beyond_this_machine_needs_a_token(path, monkeypatch):
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    wanted = dataclasses.replace(plan("served", path, Path(os.devnull)), host="0.0.0.0")
    with raises(ConfigError, TOKEN_VARIABLE, "0.0.0.0"):
        run_server(wanted, [])
    with raises(ConfigError, "enforce_eager", "NAME=VALUE"):
        run_server(dataclasses.replace(wanted, host="127.0.0.1"), ["enforce_eager"])


def test_the_list_says_what_was_never_run(monkeypatch, tmp_path):
    monkeypatch.setenv("HONE_ENGINES", str(tmp_path))
    rows = {row["name"]: row for row in json.loads(CliRunner().invoke(app, ["list", "--json"]).stdout)}
    assert set(rows) == {"native", "hf", "vllm", "sglang", "trtllm"}
    assert rows["trtllm"]["verified"].startswith("never run")
    for name in ("vllm", "trtllm"):
        assert rows[name]["installed"].startswith(f"hone engines install {name}")
