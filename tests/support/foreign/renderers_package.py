"""What the package `renderers` makes of conversations: `python renderers_package.py CASES` prints results as JSON.

CASES is a file with a list of cases: the family's name in the package, the folder of a tokenizer, and per case the tokens of a prompt
and a turn, the messages that follow it, and the tools.
"""

import json
import re
import sys
from pathlib import Path

from renderers import config_from_name, create_renderer
from transformers import AutoTokenizer


def renderer_of(family):
    """The package's renderer, over the tokenizer with the special tokens that it wants besides (images and the like)."""
    tokenizer = AutoTokenizer.from_pretrained(family["tokenizer"])
    for _ in range(50):
        try:
            return create_renderer(tokenizer, config_from_name(family["renderer"]))
        except AssertionError as error:
            missing = re.search(r"Special token '(.+?)' not found", str(error))
            if missing is None:
                raise
            tokenizer.add_tokens([missing[1]], special_tokens=True)
    raise RuntimeError("the package wants more than 50 further tokens")


def answer(renderer, case):
    """The turn as the package parses it, and the tokens that it appends for the next messages."""
    prompt, turn, tools = case["prompt"], case["turn"], case["tools"]
    result = {}
    try:
        parsed = renderer.parse_response(turn, tools=tools, prompt_ids=prompt)
        result["parsed"] = {
            "content": parsed.content or "",
            "reasoning": parsed.reasoning_content or None,
            "calls": [[call.name, call.arguments, call.status.value] for call in parsed.tool_calls],
        }
    except Exception as error:  # noqa: BLE001 - the comparison reports it
        result["parse_error"] = f"{type(error).__name__}: {error}"[:300]
    if case["next"]:
        try:
            bridged = renderer.bridge_to_next_turn(prompt, turn, case["next"], tools=tools)
            result["bridge"] = None if bridged is None else list(bridged.token_ids)[len(prompt) + len(turn) :]
        except Exception as error:  # noqa: BLE001
            result["bridge_error"] = f"{type(error).__name__}: {error}"[:300]
    return result


def main():
    results = []
    for family in json.loads(Path(sys.argv[1]).read_text()):
        try:
            renderer = renderer_of(family)
        except Exception as error:  # noqa: BLE001
            results.append({"error": f"{type(error).__name__}: {error}"[:300]})
            continue
        results.append({"answers": [answer(renderer, case) for case in family["cases"]]})
    sys.stdout.write(json.dumps(results))


if __name__ == "__main__":
    main()
