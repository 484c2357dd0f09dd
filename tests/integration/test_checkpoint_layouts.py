"""A checkpoint of any layout is read by any other, bit for bit, AdamW's state included."""

import json
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from safetensors.torch import load_file
from support import checkpoint_cases as cases
from support.examples import examples
from support.messages import mentioned
from support.ranks import Ranks
from transformers import AutoModelForCausalLM

pytestmark = pytest.mark.long("hone/training/checkpoints", "hone/training/layout.py")


@pytest.fixture(scope="module")
def two():
    with Ranks(2) as ranks:
        yield ranks


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert any(name.startswith("exp_avg_sq/") for name in expected)
    cases.same_tensors(found, expected)


@pytest.fixture(scope="module")
def saved(two, tmp_path_factory):
    """A checkpoint of each layout, and what it should hold."""
    found = {}

    def of(layout: str) -> tuple[Path, dict[str, torch.Tensor]]:
        if layout not in found:
            directory = tmp_path_factory.mktemp(layout)
            if layout == "one":
                found[layout] = directory, cases.train_and_save(directory, layout)
            else:
                found[layout] = directory, two.run(cases.train_and_save, directory, layout)[0]
        return found[layout]

    return of


@pytest.mark.parametrize("after", cases.LAYOUTS)
@pytest.mark.parametrize("before", cases.LAYOUTS)
def test_saved_by_one_layout_and_read_by_another(saved, two, before, after):
    directory, expected = saved(before)
    if after == "one":
        same(cases.read_back(directory, after), expected)
        return
    for found in two.run(cases.read_back, directory, after):
        same(found, expected)


def test_all_layouts_train_the_same_model(saved):
    """Else the equalities above would be of nothing; the last bit depends on how a shard's elements fall into vectors."""
    _, expected = saved("one")
    for layout in ("fsdp", "hybrid", "tensor"):
        for name, value in saved(layout)[1].items():
            assert torch.allclose(value, expected[name], rtol=1e-5, atol=1e-7), (layout, name)


@pytest.mark.parametrize("layout", ["fsdp", "tensor"])
def test_the_weights_are_a_hugging_face_directory_in_as_many_files_as_ranks(saved, layout):
    directory, expected = saved(layout)
    names = sorted(path.name for path in (directory / "actor").glob("*.safetensors"))
    assert names == ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    sizes = [path.stat().st_size for path in (directory / "actor").glob("*.safetensors")]
    assert max(sizes) < 1.5 * min(sizes)
    model = AutoModelForCausalLM.from_pretrained(directory / "actor")
    assert type(model).__name__ == "Qwen3ForCausalLM"
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, expected[name]), name


def test_every_piece_is_written_once(saved):
    directory, _ = saved("hybrid")
    index = json.loads((directory / "actor_optimizer/index.json").read_text())
    written = [load_file(path) for path in sorted((directory / "actor_optimizer").glob("*.safetensors"))]
    assert len(written) == 2
    assert not set(written[0]) & set(written[1])
    assert set(written[0]) | set(written[1]) == set(index["tensors"])


@pytest.mark.parametrize(("before", "after"), [("fsdp", "one"), ("one", "fsdp")])
def test_adapters(two, tmp_path, before, after):
    run = {"one": lambda f, *a, **k: f(*a, **k), "fsdp": lambda f, *a, **k: two.run(f, *a, **k)[0]}
    expected = run[before](cases.train_and_save, tmp_path, before, lora=True)
    assert not (tmp_path / "actor/config.json").exists()
    same(run[after](cases.read_back, tmp_path, after, lora=True), expected)
    saved = load_file(tmp_path / "actor/adapter_model.safetensors")
    assert saved
    assert all("lora_" in name for name in saved)


def test_tied_heads_are_saved_once(two, tmp_path):
    expected = two.run(cases.train_and_save, tmp_path, "fsdp", tied=True)[0]
    held = json.loads((tmp_path / "actor/model.safetensors.index.json").read_text())["weight_map"]
    assert "lm_head.weight" not in held
    same(cases.read_back(tmp_path, "one", tied=True), expected)


def test_tensor_and_data_parallel_at_once(tmp_path):
    with Ranks(4) as four:
        expected = four.run(cases.train_and_save, tmp_path, "both")[0]
    same(cases.read_back(tmp_path, "one"), expected)


def test_who_writes_what_is_agreed_upon_once(two, tmp_path):
    for first, second in two.run(cases.count_collectives, tmp_path):
        assert first > 0
        assert second == 0


def test_an_optimizer_whose_state_cannot_be_read_by_others_is_refused(two, tmp_path):
    for message in two.run(cases.keeps_odd_state, tmp_path):
        assert all(mentioned(word, message) for word in ("AdamW", "'row'", "[7]", "model.embed_tokens.weight"))


@st.composite
def placings(draw, shape):
    sizes = draw(st.sampled_from([(2,), (1, 2), (2, 1)]))
    axes = st.one_of(st.none(), st.integers(0, len(shape) - 1)) if shape else st.none()
    used: set[int] = set()
    chosen = []
    for _ in sizes:
        axis = draw(axes)
        chosen.append(None if axis in used else axis)
        used.add(axis)
    return sizes, tuple(chosen)


@st.composite
def tensors(draw):
    shape = tuple(draw(st.lists(st.integers(1, 5), max_size=3)))
    return shape, draw(placings(shape)), draw(placings(shape))


@examples(10, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(tensors(), min_size=1, max_size=12))
def test_tensors_of_any_shape_and_placing(two, tmp_path, drawn):
    for answers in two.run(cases.reshard, tmp_path, drawn):
        assert all(answers)
