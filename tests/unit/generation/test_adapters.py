"""An adapter on its way to an engine: what is sent, what is written, what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from support.examples import examples
from support.messages import raises

from hone.config.load import load_config
from hone.config.tree import RLConfig
from hone.errors import ConfigError, GenerationError
from hone.generation.options import adapter_shape, sends_adapter
from hone.generation.server.vllm_adapters import AdapterFolder

MODULES = [f"base_model.model.model.layers.{layer}.self_attn.{name}_proj" for layer in range(3) for name in "qkvo"]
APART = ["actor_rollout_ref.model.lora_rank=4", "actor_rollout_ref.rollout.merge_lora=false"]


def parts(modules: list[str], value: float = 0.0) -> list[tuple[str, torch.Tensor]]:
    return [
        (f"{module}.lora_{side}.default.weight", torch.full((2, 3), value + index))
        for index, module in enumerate(modules)
        for side in "AB"
    ]


@examples(20)
@given(st.sets(st.sampled_from(MODULES), min_size=1), st.lists(st.integers(0, 24), max_size=3), st.floats(-9, 9))
def test_chunks_of_any_size_become_the_files_of_peft(modules, cuts, value):
    wanted = parts(sorted(modules), value)
    folder = AdapterFolder({"r": 3, "lora_alpha": 7.5})
    for _ in range(2):
        folder.begin()
        at = [0, *sorted(min(cut, len(wanted)) for cut in cuts), len(wanted)]
        for begin, end in zip(at, at[1:], strict=False):
            folder.take(wanted[begin:end])
        folder.finish()
    saved = load_file(Path(folder.path, "adapter_model.safetensors"))
    assert saved.keys() == {name.replace(".default", "") for name, _ in wanted}
    assert all(torch.equal(saved[name.replace(".default", "")], tensor) for name, tensor in wanted)
    config = json.loads(Path(folder.path, "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (3, 7.5)
    assert set(config["target_modules"]) == {module.rsplit(".", 1)[-1] for module in modules}
    folder.remove()
    assert not Path(folder.path).exists()


def test_an_incomplete_or_foreign_adapter_is_refused():
    folder, wanted = AdapterFolder({"r": 3, "lora_alpha": 6}), parts(MODULES)
    for arrived, mentions in (
        (wanted[:-1], (1, 24)),
        ([*wanted, ("model.embed_tokens.weight", torch.zeros(2))], ("model.embed_tokens.weight", "merge_lora=true")),
        ([], ("nothing", "merge_lora=true")),
    ):
        folder.begin()
        folder.take(arrived)
        with raises(GenerationError, *mentions):
            folder.finish()
    folder.begin()
    folder.take(wanted)
    folder.finish()
    folder.begin()
    folder.take(wanted[2:])
    with raises(GenerationError, 2, 24):
        folder.finish()


def test_an_adapter_is_sent_alone_only_to_an_engine_that_computes_with_it(tmp_path):
    def config(*words: str) -> RLConfig:
        return load_config(RLConfig, [*APART, *words])

    assert adapter_shape(config("actor_rollout_ref.rollout.name=vllm")) == {"r": 4, "lora_alpha": 16}
    assert not sends_adapter(config("actor_rollout_ref.rollout.merge_lora=true"))
    assert not sends_adapter(config("actor_rollout_ref.model.lora_rank=0"))
    for words in (["name=sglang"], ["name=native"], ["name=vllm", "engine_url=tcp://there:1"]):
        with raises(ConfigError, "merge_lora=false", where="actor_rollout_ref.rollout.merge_lora"):
            adapter_shape(config(*(f"actor_rollout_ref.rollout.{word}" for word in words)))
    saved = {"r": 8, "lora_alpha": 2, "use_rslora": False}
    file = tmp_path / "adapter_config.json"
    file.write_text(json.dumps(saved))
    words = ("actor_rollout_ref.rollout.name=vllm", f"actor_rollout_ref.model.lora_adapter_path={tmp_path}")
    assert adapter_shape(config(*words)) == {"r": 8, "lora_alpha": 2}
    file.write_text(json.dumps({**saved, "use_rslora": True}))
    with raises(ConfigError, "use_rslora", where="actor_rollout_ref.rollout.merge_lora"):
        adapter_shape(config(*words))
