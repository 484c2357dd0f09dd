"""Programs of tinker-cookbook on local data: `python cookbook.py TOKENIZER MODEL DATA`, then a line `[FOLDER, PROGRAM, KEY=VALUE...]` each.

A program, a module or a file, runs in its folder as `python -m` runs it, in a fork, so that the imports take their seconds once. Its output
is FOLDER/output.txt; the answer to a line is its exit code. DATA has the rows of data sets in place of those of the hub,
`{NAME: {SPLIT: [ROW...]}}`, and the text of the document that one program fetches. MODEL gets its tokenizer from a folder.
"""

import importlib
import json
import os
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

import datasets
import httpx
import pandas
from tinker_cookbook import tokenizer_utils
from transformers import AutoTokenizer

TOKENIZER, MODEL, DATA = sys.argv[1:]
LOCAL = json.loads(Path(DATA).read_text())
WRITE_CSV, SELECT = pandas.DataFrame.to_csv, datasets.Dataset.select


def load_dataset(path, *_, split=None, **__):
    rows = datasets.DatasetDict({name: datasets.Dataset.from_list(found) for name, found in LOCAL[path].items()})
    return rows if split is None else rows[split]


def run(folder, program, words):
    os.chdir(folder)
    for number in (1, 2):
        os.dup2(os.open("output.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    sys.argv = [program, *words]
    if program.endswith(".py"):
        runpy.run_path(program, run_name="__main__")
    else:
        runpy.run_module(program, run_name="__main__", alter_sys=True)


datasets.load_dataset = load_dataset
datasets.Dataset.take = lambda rows, most: SELECT(rows, range(min(most, len(rows))))
httpx.get = lambda _: SimpleNamespace(text=LOCAL["document"], raise_for_status=lambda: None)
pandas.DataFrame.to_csv = lambda frame, path, **words: WRITE_CSV(frame, Path(path).name, **words)  # into this folder
tokenizer_utils.register_tokenizer(MODEL, lambda: AutoTokenizer.from_pretrained(TOKENIZER))
for module in ("rl.train", "preference.train_dpo", "distillation.train_on_policy"):
    importlib.import_module(f"tinker_cookbook.{module}")
for line in sys.stdin:
    place, program, *words = json.loads(line)
    child = os.fork()
    if not child:
        run(place, program, words)
        sys.exit()
    sys.stdout.write(f"{os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])}\n")
    sys.stdout.flush()
