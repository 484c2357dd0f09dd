"""`hone export` streams, and what it writes is what transformers and PEFT would compute in memory."""

import json
import shutil
import uuid
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from support.messages import raises
from support.models import VOCABULARY, tiny_model
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from hone.data.tokenizer import load_tokenizer
from hone.errors import CheckpointError, ConfigError
from hone.training.checkpoints.storage import Storage
from hone.training.checkpoints.store import CheckpointStore
from hone.training.checkpoints.tensor_files import write_tensors
from hone.training.checkpoints.weights import stage_weights
from hone.training.export import export, find_actor, parse_size


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer, models

    words = {f"w{i}": i for i in range(VOCABULARY)}
    inner = Tokenizer(models.WordLevel(words, unk_token="w0"))
    folder = tmp_path_factory.mktemp("tokenizer")
    PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="w1", pad_token="w2").save_pretrained(folder)
    return load_tokenizer(str(folder))


def save_run(root: str, tokenizer, models: dict[int, torch.nn.Module], values: dict[int, float] | None = None) -> None:
    store = CheckpointStore(root, keep=None, background=False)
    for step, model in models.items():
        write = stage_weights(model, store.begin(step) / "actor", tokenizer)
        store.publish(step, {}, {}, write, metric="m", value=(values or {}).get(step))


@pytest.fixture
def adapted(tmp_path: Path, tokenizer):
    """A base with an adapter on it, and a checkpoint of the adapter."""

    def make(tied=False, **changes):
        base = tiny_model()
        if tied:
            base.config.tie_word_embeddings = True
            base.tie_weights()
        base.save_pretrained(tmp_path / "base")
        tokenizer.save_pretrained(tmp_path / "base")
        settings = {"r": 3, "lora_alpha": 7, "target_modules": "all-linear", "init_lora_weights": False}
        torch.manual_seed(1)
        model = get_peft_model(
            AutoModelForCausalLM.from_pretrained(tmp_path / "base"), LoraConfig(**settings | changes)
        )
        model.save_pretrained(str(tmp_path / "actor"))
        config = json.loads((tmp_path / "actor/adapter_config.json").read_text())
        config |= {"base_model_name_or_path": str(tmp_path / "base"), "init_lora_weights": True}
        (tmp_path / "actor/adapter_config.json").write_text(json.dumps(config))
        tokenizer.save_pretrained(tmp_path / "actor")
        return model

    return make


def weights(directory: Path) -> dict[str, torch.Tensor]:
    return {name: value for file in sorted(directory.glob("*.safetensors")) for name, value in load_file(file).items()}


@pytest.mark.parametrize(
    ("changes", "streams"),
    [
        ({}, True),
        ({"use_rslora": True}, True),
        ({"target_modules": ["q_proj", "down_proj"]}, True),
        ({"use_dora": True}, False),
        ({"rank_pattern": {"q_proj": 1}}, False),
        ({"modules_to_save": ["lm_head"]}, False),
    ],
    ids=str,
)
def test_merging_is_what_peft_merges(adapted, tmp_path, monkeypatch, changes, streams):
    model = adapted(**changes)
    loaded = []
    original = AutoModelForCausalLM.from_pretrained
    monkeypatch.setattr(
        AutoModelForCausalLM, "from_pretrained", lambda *a, **k: (loaded.append(a), original(*a, **k))[1]
    )
    monkeypatch.setattr("hone.training.export.fits_in_memory", lambda _: False)
    export(tmp_path / "actor", tmp_path / "out")
    assert bool(loaded) != streams, "plain LoRA never loads a model"
    merged = model.merge_and_unload()
    merged.save_pretrained(tmp_path / "theirs")
    ours, theirs = weights(tmp_path / "out"), weights(tmp_path / "theirs")
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-6, atol=1e-6)
    ids = torch.arange(12).reshape(2, 6)
    found = original(tmp_path / "out")(ids).logits
    torch.testing.assert_close(found, merged(ids).logits, rtol=1e-4, atol=1e-4)


EMBEDDINGS = [{"target_modules": ["q_proj", name]} for name in ("lm_head", "embed_tokens")] + [
    {"target_modules": ["q_proj"], "modules_to_save": [name]} for name in ("lm_head", "embed_tokens")
]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("changes", EMBEDDINGS, ids=str)
def test_an_adapter_of_one_of_two_tied_embeddings_unties_them(adapted, tmp_path, changes, dtype):
    model = adapted(tied=True, **changes)
    if "modules_to_save" in changes:
        with torch.no_grad():
            for name, value in model.named_parameters():
                value.add_(0.3 * ("modules_to_save" in name) * torch.randn_like(value))
        model.save_pretrained(str(tmp_path / "saved"))
        shutil.copy(tmp_path / "saved/adapter_model.safetensors", tmp_path / "actor")
    proofs = []
    export(tmp_path / "actor", tmp_path / "out", dtype=dtype, report=proofs.append)
    written = weights(tmp_path / "out")
    assert json.loads((tmp_path / "out/config.json").read_text())["tie_word_embeddings"] is False
    ends = written["lm_head.weight"], written["model.embed_tokens.weight"]
    assert ends[0].dtype == getattr(torch, dtype) and not torch.equal(*ends)
    ids = torch.arange(12).reshape(2, 6)
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)(ids).logits
    tolerance = 1e-4 if dtype == "float32" else 0.1
    torch.testing.assert_close(found, model(ids).logits, rtol=tolerance, atol=tolerance)
    assert len(proofs) == 1 and f"all {len(written)} tensors" in proofs[0] and "logits" in proofs[0]


@pytest.mark.parametrize("fault", ["tied again", "a delta lost", "a bit flipped"])
def test_an_export_of_another_model_is_refused_and_removed(adapted, tmp_path, monkeypatch, fault):
    if fault == "tied again":  # as merging did before: the tied head is lost
        adapted(tied=True, target_modules=["q_proj", "lm_head"])
        monkeypatch.setattr("hone.training.export.merge_adapter", lambda model: model.merge_and_unload())
    elif fault == "a delta lost":
        adapted()
        monkeypatch.setattr("hone.training.export.PlainLora.merged", lambda self, name, weight: weight)
    else:
        adapted()

        def damaged(stream, specs, value):
            write_tensors(stream, specs, lambda name: value(name) + (name == "model.norm.weight") * 1e-3)

        monkeypatch.setattr("hone.training.export.write_tensors", damaged)
    with raises(CheckpointError, tmp_path / "out", "removed"):
        export(tmp_path / "actor", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_without_merging_the_adapter_is_copied(adapted, tmp_path):
    adapted()
    export(tmp_path / "actor", tmp_path / "out", merge=False)
    for file in (tmp_path / "actor").iterdir():
        assert (tmp_path / "out" / file.name).read_bytes() == file.read_bytes()
    PeftModel.from_pretrained(tiny_model(), tmp_path / "out")


def test_an_adapter_whose_base_is_gone(adapted, tmp_path):
    adapted()
    shutil.rmtree(tmp_path / "base")
    with raises(CheckpointError, tmp_path / "base", "--no-merge"):
        export(tmp_path / "actor", tmp_path / "out")


@pytest.mark.parametrize("tied", [False, True])
def test_in_another_dtype_and_in_several_files(tmp_path, tokenizer, tied):
    model = tiny_model()
    if tied:
        model.config.tie_word_embeddings = True
        model.tie_weights()
    save_run(str(tmp_path / "run/checkpoints"), tokenizer, {3: model})
    export(tmp_path / "run", tmp_path / "out", dtype="bfloat16", largest_file=10_000)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 2
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert (config["dtype"], config["tie_word_embeddings"]) == ("bfloat16", tied)
    assert ("lm_head.weight" in weights(tmp_path / "out")) != tied
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    for (name, ours), (_, theirs) in zip(found.named_parameters(), model.named_parameters(), strict=True):
        assert torch.equal(ours, theirs.bfloat16()), name
    assert load_tokenizer(str(tmp_path / "out")).encode("w3") == [3]
    export(tmp_path / "out", tmp_path / "again")
    assert weights(tmp_path / "again")["model.norm.weight"].dtype == torch.bfloat16, "by default that of the weights"


def test_a_head_that_a_file_repeats_is_dropped_when_the_model_ties_it(tmp_path, tokenizer):
    model = tiny_model()
    model.config.tie_word_embeddings = True
    model.tie_weights()
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    held = load_file(tmp_path / "model/model.safetensors")
    stale = {**held, "lm_head.weight": torch.zeros(VOCABULARY, 32)}
    save_file(stale, tmp_path / "model/model.safetensors", metadata={"format": "pt"})
    export(tmp_path / "model", tmp_path / "out")
    assert weights(tmp_path / "out").keys() == held.keys()


def test_of_a_run_the_newest_or_the_best_from_an_object_store_into_one(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    bucket = f"memory://{uuid.uuid4().hex}"
    models = {step: tiny_model(seed=step) for step in (1, 2)}
    save_run(f"{bucket}/run/checkpoints", tokenizer, models, {1: 0.5, 2: 0.1})
    for source, step in (
        ("run", 2),
        ("run/checkpoints/best", 1),
        ("run/checkpoints/step_1", 1),
        ("run/checkpoints/step_2/actor", 2),
    ):
        out = f"{bucket}/out-{source.replace('/', '-')}"
        assert export(f"{bucket}/{source}", out) == out
        with Storage(out).open("model.safetensors") as file:
            (tmp_path / "found.safetensors").write_bytes(file.read())
        found = load_file(tmp_path / "found.safetensors")
        expected = dict(models[step].named_parameters())
        assert all(torch.equal(value, expected[name]) for name, value in found.items()), source
    assert find_actor(f"{bucket}/run") == find_actor(f"{bucket}/run"), "it is fetched once"
    assert len(list((tmp_path / "cache").rglob("model.safetensors"))) == 2


def test_a_run_with_another_checkpoint_folder(tmp_path, tokenizer):
    save_run(str(tmp_path / "elsewhere"), tokenizer, {4: tiny_model()})
    (tmp_path / "run").mkdir()
    (tmp_path / "run/config.yaml").write_text(f"trainer:\n  checkpoint_dir: {tmp_path / 'elsewhere'}\n")
    assert find_actor(tmp_path / "run") == tmp_path / "elsewhere/step_4/actor"


def test_what_users_get_wrong(tmp_path, tokenizer):
    model = tmp_path / "model"
    tiny_model().save_pretrained(model)
    tokenizer.save_pretrained(model)
    (tmp_path / "full").mkdir()
    (tmp_path / "full/file").write_text("x")
    with raises(CheckpointError, tmp_path / "full", "--out"):
        export(model, tmp_path / "full")
    with raises(ConfigError, "int8", "bfloat16"):
        export(model, tmp_path / "out", dtype="int8")
    with raises(CheckpointError, tmp_path / "full", "config.json"):
        export(tmp_path / "full", tmp_path / "out")
    with raises(CheckpointError, tmp_path / "nowhere", "config.json"):
        export(tmp_path / "nowhere", tmp_path / "out")
    with raises(CheckpointError, tmp_path / "full/file/below", "--out"):
        export(model, tmp_path / "full/file/below")
    (model / "model.safetensors").write_bytes((model / "model.safetensors").read_bytes()[:-100])
    with raises(CheckpointError, "model.safetensors", "damaged"):
        export(model, tmp_path / "out2")


@pytest.mark.parametrize(("text", "size"), [("5GB", 5 * 10**9), ("500 mb", 5 * 10**8), ("0.5GiB", 2**29)])
def test_sizes(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "5", "0GB", "GB", "5TB", "-1GB"])
def test_texts_that_are_not_sizes(text):
    with raises(ConfigError, f"'{text}'", "--max-shard-size 5GB"):
        parse_size(text)


def test_a_path_with_a_wrong_letter_names_the_run_that_is_there(tmp_path: Path) -> None:
    (tmp_path / "capitals").mkdir()
    with raises(CheckpointError, "capitals?"):
        find_actor(tmp_path / "captials")
