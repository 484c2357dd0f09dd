"""Releases as real processes: gate, release, swap of a server under load, rollback, and what is refused."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.forked_python import Forks
from support.launch import hone
from support.patience import LONG
from support.serve import serving
from support.tiny_runs import make_model

from hone.errors import ConfigError
from hone.trainers.evaluation import trained_contract
from hone.training.releases import Shelf

pytestmark = [
    pytest.mark.slow,
    pytest.mark.application(
        "hone/training/releases.py",
        "hone/trainers/served_releases.py",
        "hone/apps/ops",
        "hone/cli/release.py",
        "hone/agents/serving",
    ),
]
REQUESTS, AT_ONCE = 1000, 40
TOKEN = "a token"
PROMPT = [5, 6, 7]


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two models with the same tokenizer, and their gate reports."""
    folder = tmp_path_factory.mktemp("releases")
    make_model(folder / "one")
    shutil.copytree(folder / "one", folder / "two")
    weights = load_file(folder / "two" / "model.safetensors")
    torch.manual_seed(1)
    changed = {name: weight + 0.2 * torch.randn_like(weight) for name, weight in weights.items()}
    save_file(changed, folder / "two" / "model.safetensors", {"format": "pt"})
    row = {
        "prompt": [{"role": "user", "content": "4?"}],
        "data_source": "numbers",
        "reward_model": {"ground_truth": "4"},
    }
    (folder / "rows.jsonl").write_text(json.dumps(row) + "\n")
    (folder / "score.py").write_text("def length(solution_str, **row):\n    return 1.0\n")
    (folder / "suite.yaml").write_text(
        "checks: {one: {data: rows.jsonl, reward: 'score.py:length', every: true, max_response_length: 2}}"
    )
    for model in ("one", "two"):
        run(folder, "gate", model, "--suite", "suite.yaml", "--output", f"{model}.json")
        words = ("--shelf", "shelf", "--report", f"{model}.json", "--note", f"release of {model}")
        assert "hone release rollback shelf --to 1" in run(folder, "release", "make", model, *words) or model == "one"
    return folder


def run(folder: Path, *words: str, code: int = 0) -> str:
    ended = hone(*words, log=folder / "log", cwd=folder)
    assert ended.code == code, ended.output
    return ended.output


@pytest.fixture
def url(work: Path, forks: Forks, tmp_path: Path) -> Iterator[str]:
    """A server of the current release, which is the second."""
    run(work, "release", "rollback", "shelf", "--to", "2")
    with serving(forks, work / "shelf" / "current", tmp_path / "log", "--name", "model", token=TOKEN) as address:
        yield address


def body(tokens: int) -> dict[str, Any]:
    return {"model": "model", "prompt": PROMPT, "max_tokens": tokens, "temperature": 0, "ignore_eos": True,
            "return_token_ids": True}  # fmt: skip


async def answer(client: httpx2.AsyncClient, tokens: int) -> tuple[str, tuple[int, ...]]:
    """Return the release that answered, and the sampled tokens."""
    answered = await client.post("/v1/completions", json=body(tokens))
    assert answered.status_code == 200, answered.text
    return answered.headers["x-hone-release"], tuple(answered.json()["choices"][0]["token_ids"])


def client(url: str) -> httpx2.AsyncClient:
    return httpx2.AsyncClient(base_url=url, headers={"Authorization": f"Bearer {TOKEN}"}, timeout=LONG)


def test_swaps_under_load_lose_no_request_and_mix_no_models(url: str, work: Path) -> None:
    async def load() -> tuple[Counter[tuple[str, tuple[int, ...]]], list[dict[str, Any]]]:
        async with client(url) as asking:
            alone = {(await answer(asking, 6))[0]: (await answer(asking, 6))[1]}
            left, answers, swaps = iter(range(REQUESTS)), Counter[tuple[str, tuple[int, ...]]](), []

            async def caller() -> None:
                for _ in left:
                    answers[await answer(asking, 6)] += 1

            async def swapper() -> None:
                for release in (1, 2, 1):
                    while sum(answers.values()) < REQUESTS * (len(swaps) + 1) // 5:
                        await asyncio.sleep(0.01)
                    swapped = await asking.post("/release", json={"release": release})
                    assert swapped.status_code == 200, swapped.text
                    swaps.append(swapped.json())

            await asyncio.gather(swapper(), *(caller() for _ in range(AT_ONCE)))
            last = await answer(asking, 6)
            assert last[0] == "1" and last[1] != alone["2"]
            assert {release for release, _ in answers} == {"1", "2"}
            # every answer is wholly of the model that it names
            assert {tokens for release, tokens in answers if release == "2"} == {alone["2"]}
            assert {tokens for release, tokens in answers if release == "1"} == {last[1]}
            return answers, swaps

    answers, swaps = asyncio.run(asyncio.wait_for(load(), LONG))
    assert sum(answers.values()) == REQUESTS
    assert [(swap["before"], swap["release"]) for swap in swaps] == [(2, 1), (1, 2), (2, 1)]
    assert sum(swap["finished"] for swap in swaps) > 0


def test_a_streamed_answer_ends_on_the_model_that_began_it(url: str) -> None:
    async def stream() -> tuple[str, str]:
        async with client(url) as asking:
            whole = (await asking.post("/v1/completions", json=body(300))).json()["choices"][0]["text"]
            pieces: list[str] = []
            swap: asyncio.Future[httpx2.Response] | None = None
            async with asking.stream("POST", "/v1/completions", json=body(300) | {"stream": True}) as lines:
                async for line in lines.aiter_lines():
                    if not line.startswith("data: {"):
                        continue
                    pieces.append(json.loads(line[6:])["choices"][0]["text"])
                    if len(pieces) == 1:
                        swap = asyncio.ensure_future(asking.post("/release", json={"release": 1}))
                    if len(pieces) == 3:
                        assert swap is not None and not swap.done()
            assert swap is not None and (await swap).json()["finished"] == 1
            return whole, "".join(pieces)

    whole, streamed = asyncio.run(asyncio.wait_for(stream(), LONG))
    assert streamed == whole


def test_one_command_rolls_a_server_back(url: str, work: Path) -> None:
    output = run(work, "release", "rollback", "shelf", "--server", url, "--token", TOKEN, "--note", "worse")
    assert "serves release 1" in output
    record = json.loads(run(work, "release", "list", "shelf", "--json"))
    assert record["current"] == 1 and (work / "shelf" / "current").resolve().name == "0001"
    last = record["history"][-1]
    assert (last["event"], last["release"], last["before"], last["note"]) == ("rolled_back", 1, 2, "worse")
    run(work, "release", "rollback", "shelf", code=2)  # there is none before the first
    assert "serves release 1" in run(work, "release", "deploy", "shelf", "--server", url, "--token", TOKEN)


def test_what_a_server_cannot_swap_to_is_refused(url: str, work: Path) -> None:
    async def refused() -> None:
        async with client(url) as asking:
            for wanted, status in ((9, 409), (0, 400), ("1", 400), (True, 400)):
                assert (await asking.post("/release", json={"release": wanted})).status_code == status
            assert (await asking.post("/release", content=b"[")).status_code == 400
            wrong = {"Authorization": "Bearer wrong"}
            assert (await asking.post("/release", json={"release": 1}, headers=wrong)).status_code == 401
            weights = work / "shelf" / "0001" / "model.safetensors"
            kept = weights.read_bytes()
            weights.write_bytes(kept[:-4] + b"0000")
            try:
                assert "0001" in (await asking.post("/release", json={"release": 1})).json()["error"]["message"]
            finally:
                weights.write_bytes(kept)
            assert (await asking.get("/release")).json() == {"release": 2, "swapping": False}
            assert (await answer(asking, 2))[0] == "2"

    asyncio.run(asyncio.wait_for(refused(), LONG))


def test_only_what_passed_is_released(work: Path, tmp_path: Path) -> None:
    make = ("release", "make", "one", "--shelf", str(tmp_path / "shelf"), "--report")
    assert "other weights" in " ".join(run(work, *make, "two.json", code=2).split())
    report = json.loads((work / "one.json").read_text())
    for name, change in (
        ("refused", {"passed": False}),
        ("hidden", {"conditions": [{**report["conditions"][0], "passed": False}]}),
        ("empty", {"conditions": []}),
    ):
        (tmp_path / name).write_text(json.dumps(report | change))
        run(work, *make, str(tmp_path / name), code=2)
    run(work, *make, "suite.yaml", code=2)
    assert not (tmp_path / "shelf").exists()


@pytest.mark.long(
    "hone/apps/ops", "hone/training/releases.py", "hone/trainers/served_releases.py", "hone/agents/serving/swapping.py"
)
def test_replicas_swap_too(work: Path, forks: Forks, tmp_path: Path) -> None:
    """A pool of processes is replaced like the engine in the server's process."""
    run(work, "release", "rollback", "shelf", "--to", "2")

    async def swap(url: str) -> None:
        async with client(url) as asking:
            before = await answer(asking, 6)
            waiting = [asyncio.ensure_future(answer(asking, 200)) for _ in range(8)]
            swapped = await asking.post("/release", json={"release": 1})
            assert swapped.status_code == 200, swapped.text
            assert {release for release, _ in await asyncio.gather(*waiting)} == {"2"}
            after = await answer(asking, 6)
            assert (before[0], after[0]) == ("2", "1") and before[1] != after[1]
            replicas = (await asking.get("/replicas")).json()["replicas"]
            assert [replica["state"] for replica in replicas] == ["serving"]

    options = ("--name", "model", "--replicas", "1")
    with serving(forks, work / "shelf" / "current", tmp_path / "log", *options, token=TOKEN) as url:
        asyncio.run(asyncio.wait_for(swap(url), LONG))


def test_a_release_keeps_the_contract_of_its_run_and_the_base_of_an_adapter(work: Path, tmp_path: Path) -> None:
    shelf = shutil.copytree(work / "shelf", tmp_path / "shelf", symlinks=True)
    record = json.loads((shelf / "0001" / "release.json").read_text())
    base = {"path": str(work / "two"), "digest": Shelf(work / "shelf").release(2).record["digest"]}
    record |= {"agent_contract": {"version": "1", "tools": "abc"}, "base": base}
    (shelf / "0001" / "release.json").write_text(json.dumps(record))
    assert trained_contract(str(shelf / "0001")) == record["agent_contract"]
    release = Shelf(shelf).release(1)
    release.check()
    broken = dataclasses.replace(release, record=record | {"base": {**base, "path": str(work / "one")}})
    with pytest.raises(ConfigError, match="passed the gate"):
        broken.check()
