"""The packed context against separate forward passes with transformers' own attention."""

from __future__ import annotations

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from support.examples import examples
from support.family_probe import small_config
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoModelForTokenClassification

from hone.errors import ModelError
from hone.models.attention.context import Scoring
from hone.models.attention.packed import PackedContext
from hone.models.routing import use_hone_attention

ARCHITECTURES = ("qwen3", "llama", "mistral", "gemma2", "gemma3", "gpt_oss")
LENGTHS = [9, 1, 17, 9, 4]


def sequences(lengths: list[int], seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 61, (n,), generator=generator) for n in lengths]


def packed_logits(model: nn.Module, parts: list[Tensor]) -> Tensor:
    context = PackedContext.from_lengths([len(p) for p in parts], "cpu")
    ids = torch.cat(parts)[None]
    return model(input_ids=ids, position_ids=context.position_ids, context=context, use_cache=False).logits[0]


def gradients(model: nn.Module) -> dict[str, Tensor]:
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


@pytest.mark.parametrize("checkpointing", [False, True], ids=["stored", "checkpointed"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_packed_logits_and_gradients_equal_separate_eager_passes(make_model, name, checkpointing):
    model = make_model(name)
    parts = sequences(LENGTHS)
    alone = torch.cat([model(input_ids=p[None], use_cache=False).logits[0] for p in parts])
    weight = torch.randn(alone.shape, generator=torch.Generator().manual_seed(1))
    (alone * weight).sum().backward()
    expected = gradients(model)

    use_hone_attention(model)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()
    packed = packed_logits(model, parts)
    (packed * weight).sum().backward()
    found = gradients(model)

    torch.testing.assert_close(packed, alone, atol=1e-5, rtol=1e-5)
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, atol=1e-5 * max(1.0, float(value.abs().max())), rtol=1e-4)


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("changed", range(len(LENGTHS)))
def test_changing_one_sequence_changes_no_other_exactly(make_model, name, changed):
    model = make_model(name, attention="hone")
    parts = sequences(LENGTHS)
    other = [(p + 7) % 61 if i == changed else p for i, p in enumerate(parts)]
    with torch.no_grad():
        before, after = packed_logits(model, parts), packed_logits(model, other)
    # The experts of a mixture multiply the tokens routed to them together: their number moves the last bits.
    tolerance = 1e-6 if name == "gpt_oss" else 0.0
    for i, (a, b) in enumerate(zip(before.split(LENGTHS), after.split(LENGTHS), strict=True)):
        assert (float((a - b).abs().max()) <= tolerance) == (i != changed)


def test_not_a_number_stays_in_its_sequence():
    context = PackedContext.from_lengths(LENGTHS, "cpu")
    q, k, v = torch.randn(3, 1, 2, sum(LENGTHS), 4).unbind(0)
    v[0, :, LENGTHS[0] + LENGTHS[1]] = float("nan")
    out = context.attend(0, q, k, v, Scoring(0.5))[0].split(LENGTHS)
    assert [bool(part.isnan().any()) for part in out] == [False, False, True, False, False]


@examples(60)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=9),
    heads=st.sampled_from([(4, 4), (4, 2), (4, 1)]),
    window=st.sampled_from([None, 1, 7]),
    value_dim=st.sampled_from([4, 6]),
)
def test_attend_equals_the_sequences_one_by_one(lengths, heads, window, value_dim):
    generator = torch.Generator().manual_seed(sum(lengths))
    total = sum(lengths)
    query = torch.randn(1, heads[0], total, 4, generator=generator)
    key = torch.randn(1, heads[1], total, 4, generator=generator)
    value = torch.randn(1, heads[1], total, value_dim, generator=generator)
    context = PackedContext.from_lengths(torch.tensor(lengths), "cpu")
    assert context.position_ids[0].tolist() == [i for n in lengths for i in range(n)]
    out = context.attend(0, query, key, value, Scoring(0.5, window))
    assert out.shape == (1, total, heads[0], value_dim)
    expected = []
    for q, k, v in zip(query.split(lengths, 2), key.split(lengths, 2), value.split(lengths, 2), strict=True):
        at = torch.arange(q.shape[2])
        visible = (at[:, None] >= at) & (at[:, None] - at < (window or 99))
        k, v = (x.repeat_interleave(heads[0] // heads[1], 1) for x in (k, v))
        expected.append(functional.scaled_dot_product_attention(q, k, v, attn_mask=visible, scale=0.5).transpose(1, 2))
    torch.testing.assert_close(out, torch.cat(expected, 1), atol=1e-5, rtol=1e-5)


@given(st.lists(st.integers(1, 2000), min_size=1, max_size=60))
def test_tiles_are_mostly_full(lengths):
    context = PackedContext.from_lengths(lengths, "cpu")
    cells = sum(r.rows * r.width for r in context.tiles.tiles)
    assert sum(lengths) <= cells <= sum(lengths) / 0.85 + 1


def test_lora_and_token_classification(make_model):
    model = make_model("qwen3")
    parts = sequences(LENGTHS)
    wrapped = get_peft_model(model, LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False)).eval()
    alone = torch.cat([wrapped(input_ids=p[None], use_cache=False).logits[0] for p in parts])
    use_hone_attention(wrapped)
    torch.testing.assert_close(packed_logits(wrapped, parts), alone, atol=1e-5, rtol=1e-5)

    critic = AutoModelForTokenClassification.from_config(model.config, attn_implementation="eager").eval()
    alone = torch.cat([critic(input_ids=p[None], use_cache=False).logits[0] for p in parts])
    use_hone_attention(critic)
    torch.testing.assert_close(packed_logits(critic, parts), alone, atol=1e-5, rtol=1e-5)


NARROW = {
    "vocab_size": 8,
    "hidden_size": 16,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    **dict.fromkeys(["pad_token_id", "bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"], 0),
}


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (transformers.BloomConfig(vocab_size=8, hidden_size=16, n_layer=1, n_head=2), "ALL_ATTENTION_FUNCTIONS"),
        (transformers.Zamba2Config(**NARROW, num_hidden_layers=2, intermediate_size=16, n_mamba_heads=2, mamba_d_state=8,
                                   layers_block_type=["mamba", "hybrid"], hybrid_layer_ids=[1]), "belong to no layer"),
        (transformers.BertConfig(**NARROW, intermediate_size=16), "see later ones"),
        (transformers.BartConfig(**NARROW, decoder_layers=1, decoder_ffn_dim=16), "no position_ids"),
        (transformers.ModernBertDecoderConfig(**NARROW, num_hidden_layers=1, intermediate_size=16), "no position_ids"),
        (transformers.PhimoeConfig(**NARROW, num_hidden_layers=1, intermediate_size=16), "at random"),
        (transformers.HrmTextConfig(**NARROW, head_dim=8, intermediate_size=16), "several times"),
        (transformers.DiffLlamaConfig(**NARROW, num_hidden_layers=1, intermediate_size=16), "attends twice"),
    ],
    ids=["bloom", "zamba2", "bert", "bart", "modernbert-decoder", "phimoe", "hrm_text", "diffllama"],
)  # fmt: skip
def test_models_without_context_support_are_refused_by_name(config, reason):
    model = transformers.AutoModelForCausalLM.from_config(config)
    with pytest.raises(ModelError, match=reason) as caught:
        use_hone_attention(model)
    assert type(model).__name__ in caught.value.what or type(model.base_model).__name__ in caught.value.what


@pytest.mark.parametrize(
    ("family", "kind", "needed"),
    [
        ("llama4_text", "chunked_attention", "chunk of positions"),
        ("deepseek_v32", "indexed_attention", "indexer"),
        ("glm_moe_dsa", "indexed_attention", "indexer"),
    ],
)
def test_attention_that_is_refused_says_what_it_needs(family, kind, needed):
    model = transformers.AutoModelForCausalLM.from_config(small_config(family, 61))
    with pytest.raises(ModelError, match=kind) as caught:
        use_hone_attention(model)
    assert needed in caught.value.why


def test_a_forward_pass_without_context_is_refused(make_model):
    model = make_model("llama", attention="hone")
    with pytest.raises(ModelError, match="without a context"):
        model(input_ids=torch.ones(1, 3, dtype=torch.long), use_cache=False)


@pytest.mark.parametrize("lengths", [[], [3, 0]])
def test_empty_sequences_are_refused(lengths):
    with pytest.raises(ValueError, match="at least one token"):
        PackedContext.from_lengths(lengths, "cpu")
