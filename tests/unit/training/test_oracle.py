"""The oracle agrees with sound updates, and names the layer and token at which planted faults begin."""

import types

import pytest
import torch
from support.saved_updates import STEP, actor_of, batch_of, compared, fault_in_layer, update

from hone.apps.lab.oracle import LOSS_BOUND, InFloat64, Places
from hone.errors import HoneError
from hone.models.attention.packed import PackedContext
from hone.training import objectives, packing
from hone.training.microbatches import MAX_TOKENS, _recorded_tokens, load_micro_batch

pytestmark = pytest.mark.application("hone/training", "hone/algorithms", "hone/apps/lab")

ACTOR = "actor_rollout_ref.actor"
MOE = "qwen3_moe"


@pytest.mark.parametrize(
    ("arch", "keys"),
    [
        ("qwen3", ()),
        ("qwen3", (f"{ACTOR}.dtype=bfloat16",)),
        ("qwen3", ("actor_rollout_ref.model.lora_rank=4",)),
        (
            "qwen3",
            (f"{ACTOR}.entropy_coeff=0.01", f"{ACTOR}.use_kl_loss=true", "actor_rollout_ref.rollout.temperature=0.7"),
        ),
        (
            "qwen3",
            ("actor_rollout_ref.model.enable_gradient_checkpointing=true", f"{ACTOR}.policy_loss.loss_mode=gspo"),
        ),
        ("gemma2", ()),
        (MOE, ()),
        (MOE, (f"{ACTOR}.dtype=bfloat16",)),
    ],
)
def test_a_sound_update_agrees(tmp_path, arch, keys):
    actor = actor_of(tmp_path, arch, *keys)
    update(actor, batch_of(actor))
    result = compared(tmp_path)
    assert result.first is None and result.misplaced == 0
    kinds = [(check.kind, check.layer) for check in result.checks]
    assert {("hidden", 0), ("hidden", 1), ("log_probs", None), ("loss", None), ("gradient", 1)} <= set(kinds)
    assert (("router", 1) in kinds) == (arch == MOE)
    bfloat16 = f"{ACTOR}.dtype=bfloat16" in keys
    hidden = max(check.error for check in result.checks if check.kind == "hidden")
    assert hidden > 1e-4 if bfloat16 else hidden < 1e-5


def test_a_loss_whose_terms_cancel_is_rounding(tmp_path):
    """Without advantages a KL to almost the same policy is left, whose float32 gradient has few right digits."""
    actor = actor_of(tmp_path, "qwen3", f"{ACTOR}.use_kl_loss=true")
    batch = batch_of(actor)
    now, advantages = actor.log_probs(batch).ragged("log_probs"), batch.ragged("advantages")
    near = now.with_values(now.values + 1e-4 * torch.linspace(-1, 1, len(now.values)))
    update(actor, batch.with_columns(advantages=advantages.with_values(0 * advantages.values), ref_log_probs=near))
    result = compared(tmp_path)
    assert result.first is None
    (loss,) = [check for check in result.checks if check.kind == "loss_gradient"]
    assert LOSS_BOUND < loss.error < loss.bound < 0.1


def test_saving_does_not_change_the_update(tmp_path):
    weights = []
    for steps in ("[]", f"[{STEP}]"):
        actor = actor_of(tmp_path, "qwen3", f"trainer.save_microbatch_steps={steps}")
        update(actor, batch_of(actor))
        weights.append([parameter.detach() for parameter in actor.engine.model.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*weights, strict=True))


@pytest.mark.parametrize(("arch", "dtype"), [("qwen3", "float32"), ("qwen3", "bfloat16"), (MOE, "float32")])
def test_a_wrong_segment_boundary(tmp_path, arch, dtype, monkeypatch):
    actor = actor_of(tmp_path, arch, f"{ACTOR}.dtype={dtype}")
    batch = batch_of(actor)
    sound = packing.packed_rows

    def shifted(*columns):
        context, index = sound(*columns)
        wrong = context.sequences.lengths
        wrong[1], wrong[2] = wrong[1] + 1, wrong[2] - 1  # the first token of response 2 ends response 1
        return PackedContext.from_lengths(wrong, shared=context.sequences.prefix_length), index

    with monkeypatch.context() as patch:
        patch.setattr(packing, "packed_rows", shifted)
        update(actor, batch)
    result = compared(tmp_path)
    first = result.first
    assert first is not None and first.layer == 0 and first.place is not None
    prompt = len(result.saved.batch.ragged("prompt_ids").row(2))
    assert (first.place.sequence, first.place.token) == (2, prompt)
    assert result.misplaced == len(result.saved.batch.ragged("response_ids").row(2))


def test_a_kernel_that_is_wrong_for_one_token_of_one_layer(tmp_path):
    actor = actor_of(tmp_path, "qwen3")
    batch = batch_of(actor)

    def change(output: torch.Tensor) -> torch.Tensor:
        factor = torch.ones(output.shape[1], 1, 1)
        factor[-1] = 1.001  # the last token of the last response
        return output * factor

    fault_in_layer(actor, 1, change)
    update(actor, batch)
    result = compared(tmp_path)
    first, batch = result.first, result.saved.batch  # in the order of the micro-batch
    assert first is not None and (first.kind, first.layer, first.diverging) == ("hidden", 1, 1)
    last = len(batch) - 1
    length = len(batch.ragged("prompt_ids").row(last)) + len(batch.ragged("response_ids").row(last))
    assert first.place is not None and (first.place.sequence, first.place.token) == (last, length - 1)


@pytest.mark.parametrize("shift", [1, -1])
def test_a_mask_off_by_one(tmp_path, shift, monkeypatch):
    actor = actor_of(tmp_path, "qwen3")
    batch = batch_of(actor)
    sound = objectives._padded

    def shifted(rows, name, outputs):
        values = sound(rows, name, outputs)
        return torch.roll(values, shift, dims=1) if name == "response_mask" else values

    with monkeypatch.context() as patch:
        patch.setattr(objectives, "_padded", shifted)
        update(actor, batch)
    result = compared(tmp_path)
    first = result.first
    assert first is not None and first.kind == "loss_gradient" and result.mask_shift == shift
    assert first.place is not None
    row = first.place.sequence
    mask = result.saved.batch.ragged("response_mask").row(row)
    changed = (mask != mask.roll(shift)).nonzero()[:, 0]
    assert first.place.token - first.place.prompt in changed.tolist()


@pytest.mark.parametrize("layer", [0, 1])
def test_a_router_in_bfloat16(tmp_path, layer):
    actor = actor_of(tmp_path, MOE)
    batch = batch_of(actor)
    router = actor.engine.model.model.layers[layer].mlp.gate
    sound = type(router).forward

    def rounded(self, hidden):
        weight = self.weight.data
        self.weight.data = weight.bfloat16().float()
        logits, scores, chosen = sound(self, hidden.bfloat16().float())
        self.weight.data = weight
        return logits.bfloat16().float(), scores, chosen

    router.forward = types.MethodType(rounded, router)
    update(actor, batch)
    first = compared(tmp_path).first
    assert first is not None and (first.kind, first.layer) == ("router", layer)
    assert first.diverging > first.compared / 2 and 1e-4 < first.typical < 1e-2


def test_a_backward_pass_that_is_wrong_alone(tmp_path):
    actor = actor_of(tmp_path, "qwen3")
    batch = batch_of(actor)
    actor.engine.model.model.layers[1].mlp.down_proj.weight.register_hook(lambda gradient: gradient * 1.01)
    update(actor, batch)
    first = compared(tmp_path).first
    assert first is not None and (first.kind, first.layer) == ("gradient", 1)
    assert first.detail.endswith("layers.1.mlp.down_proj.weight")


def test_a_step_that_was_not_saved(tmp_path):
    with pytest.raises(HoneError) as caught:
        load_micro_batch(tmp_path, 2)
    assert caught.value.code == "E-microbatch" and "trainer.save_microbatch_steps=[2]" in caught.value.fix


def test_casts_to_float32_are_casts_to_float64():
    values = torch.rand(4, dtype=torch.float64)
    with InFloat64():
        assert values.float().equal(values) and values.to(torch.float32).equal(values)
        assert torch.softmax(values, -1, dtype=torch.float32).dtype == torch.float64
    assert values.float().dtype == torch.float32


def test_a_long_row_keeps_the_ends_of_its_segments(tmp_path):
    lengths = [3000, 1, 500, 2999]
    positions = torch.cat([torch.arange(length) for length in lengths])
    kept = set(_recorded_tokens(positions).tolist())
    ends = torch.tensor(lengths).cumsum(0).tolist()
    assert len(kept) <= MAX_TOKENS and {0, *ends[:-1], *(end - 1 for end in ends)} <= kept

    actor = actor_of(tmp_path, "qwen3")
    batch = batch_of(actor)
    places = Places.from_saved(batch, torch.tensor([0, 5]))
    assert set(places.packed.tolist()) == {0, 5}
