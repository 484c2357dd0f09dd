"""Credentials are hidden; ordinary training keys stay readable."""

import pytest

from hone.insight.redaction import HIDDEN, is_secret_name, redact_command, redact_text, redact_tree

SECRET = (
    *("api_key", "reward.custom_reward_function.reward_kwargs.api_key", "OPENAI_API_KEY", "apiKey", "APIKey", "apikey"),
    *(
        "hf_token",
        "HF_TOKEN",
        "token",
        "auth_token",
        "accessToken",
        "AWS_SECRET_ACCESS_KEY",
        "aws_access_key_id_secret",
    ),
    *("password", "db_password", "PASSWD", "client_secret", "secret", "credentials", "private_key", "--wandb-api-key"),
)
ORDINARY = (
    *(
        "max_token_len",
        "ppo_max_token_len_per_gpu",
        "prompt_key",
        "reward_fn_key",
        "messages_key",
        "pad_token",
        "eos_token",
    ),
    *(
        "stop_token_ids",
        "tokenizer_path",
        "num_tokens",
        "tokens",
        "key",
        "keys",
        "image_key",
        "loss_agg_mode=token-mean",
    ),
    *("author", "keyboard", "secretary_path", "token_level_scores", "ignore_eos", "total_num_tokens"),
)


@pytest.mark.parametrize("name", SECRET)
def test_secret_names(name):
    assert is_secret_name(name)
    assert redact_command([f"{name}=abc"]) == [f"{name}={HIDDEN}"]
    assert redact_tree({name: "abc"}) == {name: HIDDEN}


@pytest.mark.parametrize("name", ORDINARY)
def test_ordinary_names(name):
    assert not is_secret_name(name)
    assert redact_command([f"{name}=abc", f"--{name}", "abc"]) == [f"{name}=abc", f"--{name}", "abc"]
    assert redact_tree({name: "abc"}) == {name: "abc"}


def test_command_line_forms():
    assert redact_command(["--hf-token", "a", "x=1", "--hf-token=b", "-v"]) == [
        *("--hf-token", HIDDEN, "x=1", f"--hf-token={HIDDEN}", "-v")
    ]
    assert redact_command(["reward.kwargs={url: http://h, api_key: 'a b', n: 2}"]) == [
        f"reward.kwargs={{url: http://h, api_key: {HIDDEN}, n: 2}}"
    ]
    assert redact_command(['--json={"password":"x","n":1}']) == [f'--json={{"password":{HIDDEN},"n":1}}']


@pytest.mark.parametrize(
    "value",
    ["hf_" + "aB3" * 8, "sk-" + "a1" * 15, "ghp_" + "x" * 36, "AKIA" + "A1B2" * 4],
)
def test_values_that_look_like_credentials(value):
    assert redact_tree({"note": f"use {value} here"}) == {"note": f"use {HIDDEN} here"}
    assert redact_text(f"prompt={value}") == f"prompt={HIDDEN}"


def test_urls_lose_user_and_password_only():
    assert redact_text("uri=https://me:pw@host:80/x") == f"uri=https://{HIDDEN}@host:80/x"
    assert redact_text("uri=https://host:80/x?a=b") == "uri=https://host:80/x?a=b"


def test_trees_keep_their_shape_and_types():
    tree = {"a": [1, None, True, {"api_key": "x", "n": 2.5}], "api_key": None, "password": 5, "secrets": ["p", "q"]}
    assert redact_tree(tree) == {
        "a": [1, None, True, {"api_key": HIDDEN, "n": 2.5}],
        "api_key": None,
        "password": HIDDEN,
        "secrets": [HIDDEN, HIDDEN],
    }
