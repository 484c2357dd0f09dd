"""Checks of the part Data."""

from __future__ import annotations

from typing import Any

from hone.apps.learn.work import CHECKS, Work

Row = dict[str, Any]


def question(row: Row) -> str:
    """Return the last message of a row's prompt; ValueError if that is not a chat."""
    try:
        return str(row["prompt"][-1]["content"])
    except (KeyError, IndexError, TypeError):
        raise ValueError(f"a row whose prompt is not a chat: {str(row.get('prompt'))[:60]}") from None


def truth(row: Row) -> Any:
    """Return the ground truth of a row, None without one."""
    reward = row.get("reward_model")
    return reward.get("ground_truth") if isinstance(reward, dict) else None


@CHECKS.register("parquet")
def parquet(work: Work) -> str:
    """Exactly the rows with a 9, whole and in order."""
    whole, chosen = work.rows("data/train.parquet"), work.rows("nines.parquet", "prompt")
    wanted = [row for row in whole if "9" in question(row)]
    missing = set(wanted[0]) - set(chosen[0])
    work.require(not missing, "columns", f"the columns {', '.join(wanted[0])}", f"no {', '.join(sorted(missing))}")
    work.require(
        [question(row) for row in chosen] == [question(row) for row in wanted],
        "rows",
        f"the {len(wanted)} questions with a 9 in the order of the file",
        f"{len(chosen)} rows, {sum('9' in question(row) for row in chosen)} of them with a 9",
    )
    work.require(chosen == wanted, "values", "rows as in the file", "other values in a column")
    work.answer_number(1, len(wanted), look="`hone data stats learn/nines.parquet` counts them.")
    return f"{len(wanted)} of {len(whole)} rows have a 9."


@CHECKS.register("single_turn")
def single_turn(work: Work) -> str:
    """Eight converted questions or more, each with the number of its answer as the truth."""
    import re

    from hone.data.tokenizer import load_tokenizer

    rows = work.rows("questions.parquet", "prompt", "messages")
    work.require(len(rows) >= 8, "rows", "8 questions or more in learn/questions.parquet", len(rows))
    texts = [question(row).strip() for row in rows]
    work.require(
        len(set(texts)) == len(texts), "questions", "different questions", f"{len(texts) - len(set(texts))} repeated"
    )
    sources = {row.get("data_source") for row in rows}
    work.require(
        sources == {"gsm8k"}, "data_source", "data_source=gsm8k, which compares numbers", ", ".join(map(str, sources))
    )
    for row in rows:
        answer = str(row["messages"][-1]["content"])
        numbers = re.findall(r"-?\d+(?:\.\d+)?", answer.replace(",", ""))
        work.require(
            bool(numbers) and str(truth(row)) == numbers[-1],
            "ground truth",
            f"the last number of the answer {answer[:40]!r} as its truth",
            repr(truth(row)),
        )
    tokenizer = load_tokenizer(str(work.path("tokenizer")))
    tokens = len(tokenizer.apply_chat_template(rows[0]["prompt"], add_generation_prompt=True, return_dict=False))
    work.answer_number(
        1, tokens, look="`hone data inspect learn/questions.parquet --tokenizer learn/tokenizer` counts them."
    )
    return f"{len(rows)} questions with a number each; the first prompt is {tokens} tokens."


@CHECKS.register("multi_turn")
def multi_turn(work: Work) -> str:
    """Four conversations or more, whose prompts end with the last question, and whose answers are right."""
    rows = work.rows("talk.parquet", "prompt", "messages")
    work.require(len(rows) >= 4, "rows", "4 conversations or more in learn/talk.parquet", len(rows))
    for row in rows:
        roles = [message["role"] for message in row["prompt"]]
        work.require(
            roles == ["user", "assistant"] * (len(roles) // 2) + ["user"],
            "roles",
            "user and assistant in turn, with a user's question at the end of the prompt (--to multi-turn)",
            ", ".join(roles),
        )
        _right_digits(work, row["messages"])
    longest = max(len(row["prompt"]) for row in rows)
    work.require(longest >= 5, "turns", "a prompt with three questions, which is 5 messages", f"{longest} at most")
    work.require(
        sum(len(row["prompt"]) > 1 for row in rows) >= 4, "turns", "4 rows of several turns", "rows of one turn"
    )
    counted = sum(message["role"] == "assistant" for row in rows for message in row["messages"])
    work.answer_number(1, counted, look="The loss counts the turns of the assistant.")
    work.answer_number(2, longest, look="Count the messages of prompt, not those of messages.")
    return f"{len(rows)} conversations, {counted} turns in the loss, prompts of up to {longest} messages."


def _right_digits(work: Work, messages: list[dict[str, Any]]) -> None:
    """Refuse a conversation whose assistant does not add one to each digit."""
    last = ""
    for message in messages:
        digits = "".join(filter(str.isdecimal, message["content"]))
        if message["role"] == "user":
            last = digits or last
            continue
        wanted = "".join(str((int(digit) + 1) % 10) for digit in last)
        work.require(
            bool(digits) and digits == wanted,
            "answers",
            f"the answer {wanted!r} after {last!r}",
            repr(message["content"]),
        )
        last = digits


@CHECKS.register("data_check")
def data_check(work: Work) -> str:
    """The sound rows of the dirty file, once each and in order."""
    held_out = {question(row) for row in work.rows("data/val.parquet")}
    dirty, clean = work.rows("dirty.jsonl"), work.rows("clean.jsonl", "prompt")
    leaked = sum(question(row) in held_out for row in dirty)
    work.require(
        len(dirty) > 60 and leaked > 0,
        "dirty.jsonl",
        "the file that the program of the text writes",
        f"{len(dirty)} rows",
    )
    wanted: dict[str, Row] = {}
    for row in dirty:
        if truth(row) is not None and question(row).strip() and question(row) not in held_out:
            wanted.setdefault(question(row), row)
    for defect, bad in (
        ("ground truth", [row for row in clean if truth(row) is None]),
        ("blank", [row for row in clean if not question(row).strip()]),
        ("overlap", [row for row in clean if question(row) in held_out]),
    ):
        work.require(not bad, defect, "no row of this kind", f"{len(bad)} of them")
    repeated = len(clean) - len({question(row) for row in clean})
    work.require(repeated == 0, "repetitions", "each question once", f"{repeated} repeated rows")
    work.require(clean == list(wanted.values()), "rows", f"the {len(wanted)} sound rows in order", f"{len(clean)} rows")
    work.answer_number(1, len(wanted), look="Count the lines of learn/clean.jsonl.")
    work.answer_number(2, leaked, look="`hone data check ... --val learn/data/val.parquet` counts the overlap.")
    return f"{len(wanted)} of {len(dirty)} rows are sound; {leaked} were also in the validation file."
