"""The page ``docs/config.md``, generated from the trees by ``scripts/make_docs``."""

from __future__ import annotations

from hone.config.keys import KeyDoc, blocks, documentation, yaml_value
from hone.config.migration import TABLES, VALUES
from hone.config.migration.entries import described, kind
from hone.config.trees import TREES

_HEAD = """# Configuration

<!-- Generated from hone/config/ by scripts/make_docs. Do not edit. -->

Every key of `hone train`, `hone sft`, `hone prefer` and `hone reward-model`. A key is set on the command line (`key=value`), in a YAML file with
the keys that differ (`--config-path DIR --config-name NAME`), or by a preset (`--preset NAME`). Precedence, weakest first:

    defaults on this page  <  preset  <  file  <  command line

`hone train` without a preset and a file begins with the preset of the method that `algorithm.adv_estimator` names (by default that of
GRPO), logs its values in one line, and computes in bfloat16 on a GPU that has it. `model.path` is short for
`actor_rollout_ref.model.path`, as are the other keys of that block. On the command line the end of a key is enough
(`lr=1e-5`, `rollout.n=8`); of several keys that of the policy is meant.

The command line and the files follow [Hydra](https://hydra.cc): quote lists for the shell
(`'data.train_files=[a.parquet,b.parquet]'`), refer to other keys with `${data.max_prompt_length}`, and name presets or
other files in a `defaults:` list (`- /presets/rl/grpo@_global_`). An unknown key is an error.

`hone config show` prints the configuration that a run would have (`--why`: where each value comes from; `--derived`: the roles, pools,
source of old log-probs and other facts that follow from it, with the reasons; `--diagram step.svg`: a picture of a training step, with its
stages, roles and columns), `hone config explain KEY` describes a key, also by an older name or by words (`explain "batch size"`; `hone explain` also knows terms, metrics and codes), `hone config check` runs every
check that a run makes before it starts, `hone config diff A B` compares two files, runs or presets, `hone config schema`
prints a JSON schema for editors, and `hone config presets` lists the presets.

A key that you set and that does nothing in this run is named before the start (R23).

Units: a *prompt* is a dataset row; a *sequence* is a sampled response with its prompt (`rollout.n` per prompt); a
*step* is one pass of the RL loop over one batch of prompts, with one or several optimizer *updates*. Codes such as
R14 in error messages are stable names of checks.
"""


_VERL = """## Keys of verl

`hone train` and `hone sft` accept the override lines of verl. Keys with other names are translated, keys without a meaning in Hone
are skipped with a log line, and unsupported features are refused with an alternative. `hone config import SCRIPT` translates a
whole launch script. `*` stands for one part of a key, `**` for everything in a block.
"""


def config_page() -> str:
    """Return the page as Markdown."""
    parts = [_HEAD]
    for command, tree in TREES.items():
        parts.append(f"## hone {command}\n")
        for block, doc in blocks(tree).items():
            keys = [key for key in documentation(tree) if key.path.rpartition(".")[0] == block]
            if keys:
                parts += [f"### {block}\n", f"{doc}\n", "| Key | Default | Takes | Meaning |", "|---|---|---|---|"]
                parts += [_row(key) for key in keys]
                parts.append("")
    parts.append(_VERL)
    for command, tree in TREES.items():
        if tree in TABLES:
            parts += _verl_section(command, tree)
    return "\n".join(parts)


def _verl_section(command: str, tree: type) -> list[str]:
    """Return the section about verl's keys that the tree does not have, and values that it spells differently."""
    parts = []
    rows: dict[str, dict[str, list[str]]] = {}
    for path, entry in TABLES[tree].paths().items():
        rows.setdefault(kind(entry), {}).setdefault(described(entry), []).append(f"`{path}`")
    for heading in ("Other names", "Always so here", "Not supported yet", "Without meaning here"):
        parts += [f"### {heading} (hone {command})\n", "| Key of verl | Here |", "|---|---|"]
        parts += [
            f"| {', '.join(paths)} | {says} |".replace("\\|", "|") for says, paths in sorted(rows[heading].items())
        ]
        parts.append("")
    parts += [f"### Values (hone {command})\n", "| Key | Values of verl |", "|---|---|"]
    parts += [f"| `{path}` | {change.says} |" for path, change in VALUES[tree].items()]
    parts.append("")
    return parts


def _row(key: KeyDoc) -> str:
    takes = key.type.removeprefix("a ").removeprefix("an ")
    if "choices" in key.metadata:
        takes = ", ".join(f"`{option}`" for option in key.metadata["choices"])
        takes = f"a list of {takes}" if isinstance(key.default, list) else takes
        takes += " or null" if key.type.endswith("or null") else ""
    elif key.allowed:
        takes += f", {key.allowed}"
    cells = [f"`{key.last}`", f"`{yaml_value(key.default)}`", takes, key.doc]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
