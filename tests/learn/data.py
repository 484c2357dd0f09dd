"""How the boxes of the part Data are played."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow.parquet as pq
from playing import Play, Wrong


def nines(keep: str) -> str:
    return f"""{{text}}
cat > nines.py <<'END'
import pyarrow.parquet as pq
table = pq.read_table("learn/data/train.parquet")
table = table.filter([{keep} for row in table["prompt"].to_pylist()])
pq.write_table(table, "learn/nines.parquet")
END
python nines.py"""


def rows_with_nine(learn: Path) -> list[str]:
    prompts = pq.read_table(learn / "data/train.parquet")["prompt"].to_pylist()
    return [str(sum("9" in str(prompt) for prompt in prompts))]


MORE = r"""{text}
for n in 1 2 3 4 5 6; do printf '"How much is %s, doubled?","That is %s."\n' $n $((2 * n)) >> learn/questions.csv; done
hone data convert learn/questions.csv --data-source SOURCE --ground-truth TRUTH --out learn/questions.parquet"""


def first_prompt(learn: Path) -> list[str]:
    from transformers import AutoTokenizer

    row = pq.read_table(learn / "questions.parquet").to_pylist()[0]
    tokenizer = AutoTokenizer.from_pretrained(learn / "tokenizer")
    text = tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, tokenize=False)
    return [str(len(tokenizer(text, add_special_tokens=False)["input_ids"]))]


def talks(*conversations: tuple[str, ...]) -> str:
    lines = []
    for turns in conversations:
        speakers = ["human", "gpt"] * len(turns)
        messages = [{"from": name, "value": turn} for name, turn in zip(speakers, turns, strict=False)]
        lines.append(json.dumps({"conversations": messages}))
    body = "\n".join(lines)
    return (
        f"{{text}}\ncat >> learn/talk.jsonl <<'END'\n{body}\nEND\n"
        "hone data convert learn/talk.jsonl --to multi-turn --out learn/talk.parquet"
    )


LONG = ("count 789", "890", "again", "901", "again", "012")
SHORT = ("count 5", "6", "again", "7")


def clean(keep: str) -> str:
    return f"""{{text}}
cat > clean.py <<'END'
import json
import pyarrow.parquet as pq
held_out = {{row["prompt"][-1]["content"] for row in pq.read_table("learn/data/val.parquet").to_pylist()}}
seen = set()
with open("learn/dirty.jsonl") as dirty, open("learn/clean.jsonl", "w") as clean:
    for line in dirty:
        row = json.loads(line)
        question, truth = row["prompt"][-1]["content"], row["reward_model"]["ground_truth"]
        if {keep}:
            seen.add(question)
            clean.write(line)
END
python clean.py"""


def left(learn: Path) -> list[str]:
    dirty = [json.loads(line) for line in (learn / "dirty.jsonl").read_text().splitlines()]
    held_out = {str(prompt) for prompt in pq.read_table(learn / "data/val.parquet")["prompt"].to_pylist()}
    leaked = sum(str(row["prompt"]) in held_out for row in dirty)
    return [str(len((learn / "clean.jsonl").read_text().splitlines())), str(leaked)]


PLAYS = {
    "parquet": Play(
        "nines.parquet",
        nines("'9' in row[-1]['content']"),
        answers=rows_with_nine,
        wrong=[
            Wrong("rows", nines("True")),
            Wrong("rows", nines("'8' in row[-1]['content']")),
            Wrong(
                "columns",
                nines("'9' in row[-1]['content']").replace(
                    "pq.write_table(table,", "pq.write_table(table.select(['prompt']),"
                ),
            ),
        ],
        after=[Wrong("answer 1", answers=["400"])],
    ),
    "single_turn": Play(
        "questions.parquet",
        MORE.replace("SOURCE", "gsm8k").replace("TRUTH", "last-number"),
        answers=first_prompt,
        wrong=[
            Wrong("rows", "{text}"),
            Wrong("data_source", MORE.replace("SOURCE", "exact_match").replace("TRUTH", "last-number")),
            Wrong("ground truth", MORE.replace("SOURCE", "gsm8k").replace("TRUTH", "whole")),
        ],
        after=[Wrong("answer 1", answers=["1"])],
    ),
    "multi_turn": Play(
        "talk.parquet",
        talks(LONG, SHORT, SHORT),
        answers=["9", "5"],
        wrong=[
            Wrong("rows", "{text}"),
            Wrong("turns", talks(SHORT, SHORT, SHORT)),
            Wrong("answers", talks(LONG, SHORT, ("count 9", "10", "again", "21"))),
            Wrong("columns", talks(LONG, SHORT, SHORT).replace("--to multi-turn", "--to messages")),
            Wrong("turns", talks(LONG, SHORT, SHORT).replace("--to multi-turn", "--to chat")),
        ],
        after=[Wrong("answer 1", answers=["18", "5"]), Wrong("answer 2", answers=["9", "6"])],
    ),
    "data_check": Play(
        "dirty.jsonl",
        clean("truth and question.strip() and question not in seen | held_out"),
        answers=left,
        wrong=[
            Wrong("clean.jsonl", "{text}"),
            Wrong("ground truth", clean("True")),
            Wrong("repetitions", clean("truth and question.strip() and question not in held_out")),
            Wrong("overlap", clean("truth and question.strip() and question not in seen")),
            Wrong("rows", clean("truth and question.strip() and question not in seen | held_out and len(seen) < 9")),
        ],
        after=[Wrong("answer 2", answers=lambda learn: [left(learn)[0], "0"])],
    ),
}
