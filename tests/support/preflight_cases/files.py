"""Cases of rules that read files: model directories, checkpoints, rows, templates, rewards."""

from __future__ import annotations

import json
import shutil
from typing import Any

from support.chat_templates import GEMMA, NUMBERED, PLAIN
from support.image_models import data_url, drawn, image_model
from support.preflight import SMALL_MODEL
from support.preflight_cases.keys import ACTOR, GAE, JUDGE, MODEL, MULTI, ROLLOUT, SHOWN, TOOLS
from support.preflight_cases.world import Case, World, message

from hone.data.chat_formats import CHAT_FORMATS
from hone.extras import install_command

CUSTOM = "reward.custom_reward_function.path=TMP/own.py reward.num_workers=1 preflight.reward_rows=3"
HEAD = "def compute_score(data_source, solution_str, ground_truth, extra_info):\n    "
GOLDEN = "float(ground_truth in solution_str)"
THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if enable_thinking | default(true) %}<think>\n{% endif %}{% endif %}"
)
NO_TOOLS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LONG = message("9 + 8 + 7 + 6 " * 20)


BAD_CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{1"}}],
}
"""A message whose call no parser reads."""


def tool_file(about: str, argument: dict[str, str]) -> str:
    """Return a file of a tool with the schema of another program."""
    function = {"name": "weigh", "description": about, "parameters": {"type": "object", "properties": {"x": argument}}}
    schema = {"type": "function", "function": function}
    return f"from hone.agents.tools import tool\n\n\n@tool(schema={schema!r})\ndef weigh(x: float) -> str:\n    return 'kg'\n"


def instructed(text: str) -> dict[str, Any]:
    """Return the prompt of a row with a system message."""
    return {"prompt": [{"role": "system", "content": text}, {"role": "user", "content": "What is 2 + 3?"}]}


KUHN = {"extra_info": {"environment": {"name": "kuhn_poker", "seed": 1}}}
"""Columns of a row with a game."""


PAIR = {"prompt": "1 + 1 = ?", "chosen": "2", "rejected": "3"}
PAIR_WITH_CALL = {
    "prompt": [{"role": "user", "content": "a"}],
    "chosen": [{**BAD_CALL, "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}],
    "rejected": [{"role": "assistant", "content": "b"}],
}


def with_bitsandbytes(world: World, found: object = True) -> None:
    """Simulate that the package is installed, or with None that it is not."""
    from hone.models import four_bits

    world.monkeypatch.setattr(four_bits, "find_spec", lambda _: found)


def valid_rows(world: World) -> None:
    """Write rows without problems."""
    world.rows()


def template(world: World, text: str) -> None:
    """Replace the chat template of the model."""
    world.write("model/chat_template.jinja", text)


def restore_template(world: World) -> None:
    """Restore the chat template of the model."""
    template(world, (world.folder / "original.jinja").read_text())


def checkpoint(world: World, **changes: object) -> None:
    """Write the parts of a checkpoint that preflight reads."""
    folder = world.folder / "run" / "checkpoints" / "step_4"
    (folder / "actor").mkdir(parents=True, exist_ok=True)
    (folder / "actor" / "config.json").write_text(json.dumps({**SMALL_MODEL, **changes}))
    (folder / "checkpoint.json").write_text(json.dumps({"format": 2, "step": 4, "files": {}}))
    (folder / "state.json").write_text(json.dumps({"step": 4}))


def image_world(world: World) -> None:
    """Make the model one that reads images, and give the rows one each."""
    made = image_model(world.folder, "qwen3_vl")
    shutil.rmtree(world.model)
    shutil.copytree(made, world.model)
    prompt = [message("<image> 1 + 1 = ?")]
    images = {number: [data_url(drawn((25 * number, 0, 0)))] for number in (2, 5)}
    world.rows(at={number: {"prompt": prompt, "images": shown} for number, shown in images.items()})


def reward(body: str):
    """Return a function that writes a custom reward function."""
    return lambda world: world.write("own.py", f"{HEAD}{body}\n")


def wrong_eos(world: World) -> None:
    """Change the end-of-sequence token to one that does not end a turn."""
    settings = json.loads((world.model / "tokenizer_config.json").read_text())
    world.write("model/tokenizer_config.json", json.dumps({**settings, "eos_token": "<|endoftext|>"}))


def tool_rows(results: list[str], calls: int) -> dict[int, dict[str, object]]:
    """Rows whose prompt shows one turn of tool use."""
    named = [{"type": "function", "function": {"name": "calculator", "arguments": "{}"}}] * calls
    shown = [message("1 + 1 = ?"), message("", "assistant", tool_calls=named)]
    shown += [message(result, "tool") for result in results] + [message("2 + 2 = ?")]
    return {number: {"prompt": shown} for number in range(10)}


def other_tokenizer(world: World) -> None:
    """Give the teacher a tokenizer with one token more."""
    teacher = world.folder / "teacher"
    shutil.copytree(world.model, teacher, dirs_exist_ok=True)
    settings = json.loads((teacher / "tokenizer.json").read_text())
    added = {**settings["added_tokens"][-1], "id": settings["added_tokens"][-1]["id"] + 1, "content": "<|extra|>"}
    settings["added_tokens"].append(added)
    (teacher / "tokenizer.json").write_text(json.dumps(settings))


def same_tokenizer(world: World) -> None:
    """Give the teacher the tokenizer of the policy."""
    shutil.copy(world.model / "tokenizer.json", world.folder / "teacher" / "tokenizer.json")


def mark_is_special(world: World, mark: str = "####") -> None:
    """Make the mark of an answer a special token."""
    settings = json.loads((world.model / "tokenizer.json").read_text())
    last = settings["added_tokens"][-1]
    settings["added_tokens"].append({**last, "id": last["id"] + 1, "content": mark, "special": True})
    (world.model / "tokenizer.json").write_text(json.dumps(settings))


def mark_is_text(world: World) -> None:
    """Make it a token that is not special."""
    settings = json.loads((world.model / "tokenizer.json").read_text())
    settings["added_tokens"][-1]["special"] = False
    (world.model / "tokenizer.json").write_text(json.dumps(settings))


DIRECTORIES = [
    Case(
        "R84 distillation.teachers_share_the_tokenizer",
        "distillation.enable=true distillation.path=TMP/teacher distillation.loss_mode=jsd_topk",
        ("'teacher'", "1 tokens of the teacher"),
        advice="distillation.loss_mode=k1",
        breaks=other_tokenizer,
        repairs=same_tokenizer,
    ),
    Case(
        "R84 distillation.spans_of_text_can_be_compared",
        f"distillation.enable=true distillation.path=TMP/teacher {ROLLOUT}.temperature=0.7",
        ("'teacher'", "0.7"),
        advice=f"{ROLLOUT}.temperature=1",
        then=f"distillation.enable=true distillation.path=TMP/teacher {ROLLOUT}.temperature=1",
        breaks=other_tokenizer,
    ),
    Case(
        "R84 distillation.served_teachers_answer",
        "distillation.enable=true distillation.path=http://127.0.0.1:9/v1",
        ("http://127.0.0.1:9/v1/models", "2 times"),
        advice="start the server",
        then="distillation.enable=true distillation.path=TMP/model",
    ),
    Case(
        "R94 four_bits.packed_base_is_frozen",
        f"{MODEL}.quantization=nf4",
        (f"{MODEL}.quantization=nf4", "no adapter"),
        fix=f"{MODEL}.lora_rank=16",
        given=f"{ACTOR}.optim.lr=1e-4",
        breaks=with_bitsandbytes,
    ),
    Case(
        "R94 four_bits.engine_reads_the_packed_base",
        f"{ROLLOUT}.num_replicas=1",
        (f"{MODEL}.quantization=nf4", "'native'", "processes of its own"),
        fix=f"{ROLLOUT}.num_replicas=null",
        given=f"{MODEL}.quantization=nf4 {MODEL}.lora_rank=16 {ACTOR}.optim.lr=1e-4",
        breaks=with_bitsandbytes,
    ),
    Case(
        "R94 four_bits.model_can_be_packed",
        f"{MODEL}.quantization=nf4",
        ("bitsandbytes", f"{MODEL}.quantization"),
        advice=install_command("quantization"),
        then=f"{MODEL}.quantization=nf4",
        given=f"{MODEL}.lora_rank=16 {ACTOR}.optim.lr=1e-4",
        breaks=lambda world: with_bitsandbytes(world, None),
        repairs=with_bitsandbytes,
    ),
    Case(
        "R95 files.family_can_be_trained",
        breaks=lambda world: world.settings(model_type="diffllama"),
        says=("DiffLlama", "model.path"),
        advice="Qwen3",
        repairs=lambda world: world.settings(),
    ),
    Case(
        "R90 engines.draft_model_shares_the_tokenizer",
        f"{ROLLOUT}.speculative.method=draft_model {ROLLOUT}.speculative.model=TMP/teacher",
        ("'teacher'", "1 tokens of the draft model"),
        advice="method=ngram",
        breaks=other_tokenizer,
        repairs=same_tokenizer,
    ),
    Case(
        "R84 distillation.every_row_has_a_teacher",
        "distillation.enable=true distillation.teacher_prompt='{prompt}{hint}'",
        ("hint", "ground_truth"),
        advice="distillation.teacher_prompt=",
        then="distillation.enable=true distillation.teacher_prompt='{prompt}{ground_truth}'",
    ),
    Case(
        "R08 files.model_directory",
        breaks=lambda world: (world.model / "model.safetensors").rename(world.folder / "aside"),
        says=("TMP/model", "model.safetensors"),
        advice="copy",
        repairs=lambda world: (world.folder / "aside").rename(world.model / "model.safetensors"),
    ),
    Case(
        "R08 files.overridden_settings",
        f"{MODEL}.override_config={{attention_dropot:0.1}}",
        ("attention_dropot",),
        advice="attention_dropout",
        then=f"{MODEL}.override_config={{}}",
    ),
    Case(
        "R08 files.critic_directory",
        "critic.model.path=TMP/nowhere",
        ("TMP/nowhere", "critic.model.path"),
        advice="critic.model.path=DIR",
        then="critic.model.path=TMP/model",
        given=GAE,
    ),
    Case(
        "R08 methods.reward_model_directory",
        f"{JUDGE}.enable=true",
        ("reward_model.enable=true",),
        advice=f"{JUDGE}.path=DIR",
        then=f"{JUDGE}.path=TMP/judge",
        breaks=lambda world: judge(world),
    ),
    Case(
        "R76 engines.engine_judges",
        f"{JUDGE}.rollout.name=sglang",
        ("engine 'sglang'", "kind=discriminative"),
        advice=f"{JUDGE}.rollout.name=vllm",
        then=f"{JUDGE}.rollout.name=native",
        given=f"{JUDGE}.enable=true {JUDGE}.path=TMP/judge",
        breaks=lambda world: judge(world),
    ),
    Case(
        "R08 template.tokenizer_loads",
        breaks=lambda world: world.settings(vocab_size=100),
        says=("TMP/model", "vocab_size=100"),
        advice=f"{MODEL}.tokenizer_path=DIR",
        repairs=lambda world: world.settings(),
    ),
    Case(
        "R30 files.model_length",
        "data.max_response_length=1600",
        ("= 2112 tokens", "max_position_embeddings=2048"),
        advice="2048 tokens",
        then="data.max_response_length=1536",
    ),
    Case(
        "R39 files.chat_template",
        breaks=lambda world: (world.model / "chat_template.jinja").unlink(),
        says=("TMP/model", "chat template"),
        advice=f"{MODEL}.custom_chat_template=PATH",
        then=f"{MODEL}.custom_chat_template=TMP/original.jinja",
    ),
    Case(
        "R55 files.run_directory",
        "trainer.default_local_dir=/dev/null/run",
        ("/dev/null/run", "/dev/null "),
        advice="trainer.default_local_dir=DIR",
        then="trainer.default_local_dir=TMP/run",
    ),
    Case(
        "R55 lifecycle.checkpoint_of_this_model",
        breaks=lambda world: checkpoint(world, hidden_size=64, vocab_size=512),
        says=("step_4", "vocab_size=512, not 300, hidden_size=64, not 32"),
        advice="trainer.experiment_name=",
        repairs=lambda world: checkpoint(world),
    ),
    Case(
        "R56 lifecycle.long_runs_are_saved",
        "trainer.total_training_steps=500",
        ("500 steps", "save_freq=-1"),
        fix="trainer.save_freq=25",
        warns=True,
    ),
]

ROWS = [
    Case(
        "R42 files.datasets",
        "data.prompt_key=question",
        ("question", "prompt"),
        advice="prompt",
        then="data.prompt_key=prompt",
    ),
    Case(
        "R42 rows.prompts_are_sound",
        breaks=lambda world: world.rows(at={3: {"prompt": []}, 4: {"prompt": None}}),
        says=("row 3", "2 of 10 rows"),
        advice="hone data clean",
        repairs=valid_rows,
    ),
    Case(
        "R42 rows.conversations_are_sound",
        breaks=lambda world: world.rows(at={6: {"messages": [message("a")]}}),
        says=("row 6", "assistant"),
        advice="remove",
        repairs=valid_rows,
        tree="sft",
    ),
    Case(
        "R81 rows.tool_calls_are_sound",
        breaks=lambda world: world.rows(at={5: {"messages": [message("a"), BAD_CALL]}}),
        says=("row 5", "1 of 10 rows"),
        advice="data.tool_call_errors=drop",
        given="model.custom_chat_template=TMP/tools.jinja",
        repairs=valid_rows,
        tree="sft",
        warns=True,
    ),
    Case(
        "R42 rows.sampler_fits_the_rows",
        "data.sampler.name=mixture",
        ("data.sampler.weights",),
        fix="data.sampler.weights={exact:1}",
    ),
    Case(
        "R82 rows.stages_have_gates_and_rows",
        "data.sampler.stages=[{name:first,rows:{data_source:gsm9k},success:0.5},{name:all}]",
        ("'first'", "0 of 10 rows", "'exact'"),
        advice="rows",
        then="data.sampler.stages=[{name:first,rows:{data_source:exact},success:0.5},{name:all}]",
        given="data.sampler.name=stages",
    ),
    Case(
        "R86 rows.rows_are_read_whole",
        "",
        ("1 image", "train.jsonl, row 3"),
        advice="leave such rows out",
        breaks=lambda world: world.rows(at={3: {"images": ["cat.png"]}}),
        repairs=valid_rows,
    ),
    Case(
        "R86 rows.run_reads_images",
        f"{ACTOR}.ulysses_sequence_parallel_size=2",
        ("ulysses_sequence_parallel_size=2", "with images"),
        given="trainer.runtime=ray trainer.n_gpus_per_node=2",
        fix=f"{ACTOR}.ulysses_sequence_parallel_size=1",
        breaks=image_world,
    ),
    Case(
        "R86 rows.frozen_tower_exists",
        f"{MODEL}.freeze_vision_tower=true",
        ("freeze_vision_tower=true", "no vision tower"),
        fix=f"{MODEL}.freeze_vision_tower=false",
    ),
    Case(
        "R42 methods.preference_columns_exist",
        "data.chosen_key=better",
        ("'better' and 'rejected'",),
        advice="hone data pairs",
        then="data.chosen_key=chosen",
        tree="prefer",
    ),
    Case(
        "R43 rows.every_source_has_a_reward",
        breaks=lambda world: world.rows(at={5: {"data_source": "gsm9k"}, 6: {"data_source": "gsm9k"}}),
        says=("'gsm9k' (2 rows)",),
        advice="reward.scorer=NAME",
        then="reward.scorer=exact",
    ),
    Case(
        "R44 rows.every_row_has_a_ground_truth",
        breaks=lambda world: world.rows(at={n: {"reward_model": {"ground_truth": ""}} for n in (1, 2)}),
        says=("row 1", "2 of 10 rows", "ground_truth"),
        advice="hone data clean",
        repairs=valid_rows,
    ),
    Case(
        "R46 rows.an_epoch_has_steps",
        "data.train_batch_size=16",
        ("10 rows", "data.train_batch_size=16"),
        fix="data.train_batch_size=10",
        then=f"{ACTOR}.ppo_mini_batch_size=5",
    ),
    Case(
        "R46 template.an_epoch_has_steps_after_dropping",
        "data.truncation=drop",
        ("10 rows, 8 left", "2 long prompts", "data.train_batch_size=9"),
        fix="data.train_batch_size=8",
        then=f"{ACTOR}.ppo_mini_batch_size=8 preflight.allow=[R45]",
        given=f"data.max_prompt_length=64 data.train_batch_size=9 {ACTOR}.ppo_mini_batch_size=9",
        breaks=lambda world: world.rows(
            at={n: {"prompt": [LONG | {"content": f"{n} {LONG['content']}"}]} for n in (3, 5)}
        ),
        also=("R45",),
    ),
    Case(
        "R47 rows.rows_differ",
        breaks=lambda world: world.rows(at={n: {"prompt": [message("1 + 1 = ?")]} for n in (1, 2, 3)}),
        says=("2 of 10 training prompts (20%)", "3 times"),
        advice="r",
        repairs=valid_rows,
        warns=True,
    ),
    Case(
        "R47 rows.pairs_differ_in_quality",
        breaks=lambda world: world.write("pairs.jsonl", (json.dumps(PAIR | {"chosen": "2 " * 20}) + "\n") * 60),
        says=("60 of 60 pairs",),
        advice="val/rewards/accuracies_longer",
        repairs=lambda world: world.write("pairs.jsonl", (json.dumps(PAIR) + "\n") * 60),
        tree="prefer",
        warns=True,
    ),
]

TURNS = [
    Case(
        "R33 agents.several_turns_are_played",
        f"{MULTI}.tool_config_path=TMP/tools.yaml",
        ("tool_config_path", "multi_turn.enable=false"),
        fix=f"{MULTI}.enable=true {MULTI}.max_assistant_turns=8",
        given=SHOWN,
    ),
    Case(
        "R34 agents.conversations_begin_with_messages",
        breaks=lambda world: world.rows(at={n: {"prompt": [5, 6, n + 1]} for n in range(10)}),
        says=("10 of 10 prompts",),
        advice='[{"role": "user", "content": "..."}]',
        repairs=valid_rows,
        given=f"{TOOLS} {SHOWN}",
    ),
    Case(
        "R35 agents.tools_are_shown",
        f"{MODEL}.custom_chat_template=TMP/no_tools.jinja",
        ("tools",),
        advice="template",
        then=SHOWN,
        given=TOOLS,
    ),
    Case(
        "R37 agents.tool_limits_cover_the_prompts",
        f"{MULTI}.max_tool_response_length=20",
        ("10 of 20 tool results", "(50%)", "=20 tokens (longest 30)"),
        fix=f"{MULTI}.max_tool_response_length=30",
        given=f"{TOOLS} {SHOWN} preflight.allow=[R47]",
        breaks=lambda world: world.rows(at=tool_rows(["2", "7" * 30], 2)),
        warns=True,
    ),
    Case(
        "R96 agents.tools_are_described",
        says=("'weigh' has no description", "what x is"),
        advice="each argument",
        given=f"{TOOLS} {SHOWN} {MULTI}.function_tool_path=TMP/own_tools.py preflight.allow=[R47]",
        breaks=lambda world: world.write("own_tools.py", tool_file("", {"type": "number"})),
        repairs=lambda world: world.write("own_tools.py", tool_file("Weigh x on the scale.", {"type": "number"})),
        warns=True,
    ),
    Case(
        "R96 agents.tools_and_system_prompts_agree",
        says=("not configured: adder", "calculator"),
        advice="the configured names",
        given=f"{TOOLS} {SHOWN} preflight.allow=[R47]",
        breaks=lambda world: world.rows(at={2: instructed("Call `adder` for sums.")}),
        repairs=lambda world: world.rows(at={2: instructed("Call `calculator` for sums.")}),
        warns=True,
    ),
    Case(
        "R48 agents.agents_and_tools_exist",
        breaks=lambda world: world.rows(at={4: {"agent_name": "tool_agnt"}}),
        says=("'tool_agnt' (1 of 10 rows)",),
        advice="tool_agent",
        repairs=lambda world: world.rows(at={4: {"agent_name": "tool_agent"}}),
        given=f"{TOOLS} {SHOWN}",
    ),
    Case(
        "R62 methods.self_play_has_roles",
        breaks=lambda world: world.rows(at={n: {"agent_name": "self_play", **KUHN} for n in range(10)}),
        says=("10 rows", "adv_estimator=grpo"),
        fix="algorithm.adv_estimator=rae",
        given=f"{MULTI}.enable=true {MULTI}.max_assistant_turns=4 {SHOWN}",
    ),
]

TEMPLATES = [
    Case(
        "R36 template.truncation_spares_the_system_message",
        "data.max_prompt_length=64 data.truncation=truncate",
        ("1 of them", "system message"),
        fix="data.truncation=drop",
        then="preflight.allow=[R45]",
        breaks=lambda world: world.rows(at={5: {"prompt": [message("Add.", "system"), LONG]}}),
    ),
    Case(
        "R45 template.prompts_fit",
        "data.max_prompt_length=64",
        ("1 of 10 prompts", "64 tokens", "row 3"),
        advice="data.max_prompt_length=",
        then="data.max_prompt_length=256",
        breaks=lambda world: world.rows(at={3: {"prompt": [LONG]}}),
    ),
    Case(
        "R39 template.template_takes_the_prompts",
        breaks=lambda world: world.rows(at={4: {"prompt": [message("Add.", "system"), message("4 + 1 = ?")]}}),
        says=("row 4", "roles"),
        advice="roles",
        repairs=valid_rows,
        given=f"{MODEL}.custom_chat_template=TMP/gemma.jinja {ROLLOUT}.stop=['<|/turn|>']",
    ),
    Case(
        "R39 template.template_only_appends",
        breaks=lambda world: world.rows(
            at={2: {"messages": [message("1"), message("2", "assistant"), message("3"), message("4", "assistant")]}}
        ),
        says=("message 1", "character 0"),
        advice="template",
        then="model.custom_chat_template=null",
        given="model.custom_chat_template=TMP/numbered.jinja",
        tree="sft",
        warns=True,
    ),
    Case(
        "R39 template.template_takes_the_preferences",
        breaks=lambda world: world.write("pairs.jsonl", (json.dumps(PAIR_WITH_CALL) + "\n") * 2),
        says=("message 1", "'f'"),
        advice="template",
        then="model.custom_chat_template=TMP/tools.jinja",
        tree="prefer",
    ),
    Case(
        "R40 template.turns_can_end",
        breaks=wrong_eos,
        says=("'<|im_end|>' (3)", "[1]"),
        advice="eos_token_id: [1, 3] in the model's generation_config.json",
        repairs=lambda world: world.write("model/generation_config.json", json.dumps({"eos_token_id": [1, 3]})),
    ),
    Case(
        "R40 template.turns_end",
        says=("special token",),
        advice="model.custom_chat_template=PATH",
        then="model.custom_chat_template=null",
        given="model.custom_chat_template=TMP/plain.jinja",
        tree="sft",
        warns=True,
    ),
    Case(
        "R93 template.marks_of_answers_are_text",
        breaks=mark_is_special,
        says=("scorer gsm8k", "'####'"),
        advice='"special": false',
        repairs=mark_is_text,
        given="reward.scorer=gsm8k",
        warns=True,
    ),
    Case(
        "R41 template.thinking_fits",
        breaks=lambda world: template(world, THINKING),
        says=("max_response_length=512", "thinking"),
        advice="data.apply_chat_template_kwargs={enable_thinking: false}",
        then="data.apply_chat_template_kwargs={enable_thinking:false}",
        warns=True,
    ),
]

REWARDS = [
    Case(
        "R49 rows.reward_R49",
        breaks=reward("return 0.0"),
        says=("3 rows",),
        advice="hone reward test",
        repairs=reward(f"return {GOLDEN}"),
        given=CUSTOM,
    ),
    Case(
        "R50 rows.reward_R50",
        breaks=lambda world: world.write("own.py", "def score(**kwargs): return 0.0\n"),
        says=("own.py", "'compute_score'"),
        advice="score",
        repairs=reward(f"return {GOLDEN}"),
        given=CUSTOM,
    ),
    Case(
        "R51 rows.reward_R51",
        breaks=reward("return float('inf')"),
        says=("inf",),
        advice="number",
        repairs=reward(f"return {GOLDEN}"),
        given=CUSTOM,
    ),
    Case(
        "R52 rows.reward_R52",
        breaks=reward("return float(int(solution_str))"),
        says=("ValueError",),
        advice="",
        repairs=reward(f"return {GOLDEN}"),
        given=CUSTOM,
    ),
    Case(
        "R53 rows.reward_R53",
        breaks=reward(f"import time; time.sleep(0.02)\n    return {GOLDEN}"),
        says=("8192 sequences / 1 workers",),
        advice="num_workers=",
        repairs=reward(f"return {GOLDEN}"),
        given=f"{CUSTOM} data.train_batch_size=2048 {ACTOR}.ppo_mini_batch_size=2048 preflight.reward_rows=1 preflight.allow=[R46]",
        warns=True,
    ),
    Case(
        "R54 rows.reward_R54",
        breaks=reward(f"return 100 * {GOLDEN}"),
        says=("100",),
        advice="",
        repairs=reward(f"return {GOLDEN}"),
        given=CUSTOM,
        warns=True,
    ),
    Case(
        "R54 rows.reward_R54",
        breaks=reward(f"return 2 * {GOLDEN} - 1"),
        says=("-1 to 1", "from 0"),
        advice="adv_estimator=rloo",
        repairs=reward(f"return {GOLDEN}"),
        given=f"{CUSTOM} algorithm.adv_estimator=prime",
    ),
]


def judge(world: World) -> None:
    """Write a directory that looks like a reward model."""
    import shutil

    shutil.copytree(world.model, world.folder / "judge", dirs_exist_ok=True)
    kinds = {**SMALL_MODEL, "architectures": ["Qwen3ForSequenceClassification"]}
    world.write("judge/config.json", json.dumps(kinds))


FILE_CASES = [*DIRECTORIES, *ROWS, *TURNS, *TEMPLATES, *REWARDS]
TEMPLATE_FILES = {
    "gemma.jinja": GEMMA,
    "numbered.jinja": NUMBERED,
    "plain.jinja": PLAIN,
    "tools.jinja": CHAT_FORMATS["chatml_tools"].template,
    "no_tools.jinja": NO_TOOLS,
}
