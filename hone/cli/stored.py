"""`hone replay`, `what-if`, `oracle` and `episode`: stored steps and episodes, computed again."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hone.apps.lab.compare import find_run
from hone.cli.options import RUNS, Json, Root, RunName, Trust, new_group
from hone.cli.output import new_console, new_table, print_json, print_plain
from hone.errors import HoneError
from hone.insight.run_files import disk_errors

if TYPE_CHECKING:
    from hone.apps.lab.forks import ForkedEpisode
    from hone.apps.lab.replay.trace import PromptTrace
    from hone.apps.lab.replay.what_if import WhatIf


def replay(
    run: Annotated[str, typer.Argument(help="directory or name of a run")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[key=value]...", help="keys of the configuration to change")
    ] = None,
    step: Annotated[int, typer.Option("--step", help="a step of trainer.save_steps_for_replay", min=1)] = 1,
    first: Annotated[
        str | None,
        typer.Option(
            "--from", help="first stage to run, such as reward, adv or update_actor; those before it are stored"
        ),
    ] = None,
    root: Root = RUNS,
    trust: Trust = False,
    as_json: Json = False,
) -> None:
    """Run a stored step again from the checkpoint before it, and compare tokens, rewards, advantages, metrics and weights.

    Exit code 0 if all are equal bit for bit, 1 if something differs. Example: hone replay demo --step 20 --from adv
    """
    from hone.apps.lab.replay.replay import replay
    from hone.cli.runs import bisection_lines

    result = replay(find_run(run, root).path, step, first, overrides or ())
    different = result.bisection.first
    if as_json:
        print_json({"folder": str(result.folder), "stages": result.stages, "first": different and vars(different)})
    else:
        typer.echo(f"step {step} again: {', '.join(result.stages)}; in {result.folder}")
        if different is None:
            typer.echo("equal bit for bit to the stored step")
        for line in bisection_lines(result.bisection) if different is not None else ():
            typer.echo(line)
    if different is not None:
        raise typer.Exit(1)


def what_if(
    run: Annotated[str, typer.Argument(help="directory or name of a run")],
    changes: Annotated[
        list[str] | None,
        typer.Argument(metavar="[key=value]...", help="keys of algorithm and actor to change, all at once"),
    ] = None,
    step: Annotated[int, typer.Option("--step", help="step with all its samples in rollouts/", min=1)] = 1,
    root: Annotated[Path, typer.Option("--root", help="folder in which names are looked for")] = Path("runs"),
    weights: Annotated[
        bool, typer.Option("--weights/--no-weights", help="compare gradients by the weights that the step began with")
    ] = True,
    trust: Trust = False,
    as_json: Json = False,
) -> None:
    """Compute a stored step again with other keys, or with every registered estimator and policy loss, and compare.

    The first line is the run itself. Example: hone what-if demo --step 10 algorithm.adv_estimator=rloo
    """
    from hone.apps.lab.replay.stored import WeightGradients, load_step
    from hone.apps.lab.replay.what_if import every_method, what_if

    stored = load_step(find_run(run, root).path, step)
    named = [("changed", changes)] if changes else list(every_method(stored.config))
    result = what_if(stored, named, WeightGradients(stored) if weights else None)
    if as_json:
        print_json(result.as_json())
    else:
        _show(result, stored.step)
        if changes:
            typer.echo(f"changed: {' '.join(changes)}")


def _show(result: WhatIf, step: int) -> None:
    console = new_console()
    equal = "bit for bit equal to" if result.gap == 0 else f"up to {result.gap:.2g} apart from"
    console.print(f"step {step}: advantages computed again are {equal} those that the run used", highlight=False)
    headings = ["loss>", "|advantage|>", "turned>", "clipped>", "effective>", "cosine>"]
    table = new_table("", *headings, *(["direction>"] if result.exact is not None else []))
    for line in result.compared:
        if line.missing is not None:
            table.add_row(line.name, *["-"] * (len(table.columns) - 1))
            continue
        shares = [f"{share:.1%}" for share in (line.turned, line.clipped, line.effective_share)]
        direction = [] if line.direction is None else [f"{line.direction:.4f}"]
        table.add_row(line.name, f"{line.loss:.4g}", f"{line.advantage:.4g}", *shares, f"{line.cosine:.4f}", *direction)
    console.print(table)
    for line in result.compared:
        if line.missing is not None:
            console.print(f"{line.name}: {line.missing}", highlight=False)
    console.print(_LEGEND, highlight=False)
    if result.exact is False:
        console.print("direction: of the last layer's parameters alone", highlight=False)


_LEGEND = """loss: of the first mini-batch, at the weights before the step
turned: sequences whose advantage has the other sign
clipped: tokens with an advantage that the loss does not move
effective: tokens that carry the gradient, as a share of those in the loss (1 if all weigh the same)
cosine: with the run, of the derivatives by log-probs; direction: of the gradients by the weights"""


def trace(
    run: RunName,
    step: Annotated[int, typer.Option("--step", help="step with all its samples in rollouts/", min=1)] = 1,
    prompt: Annotated[
        str | None, typer.Option(help="uid of the prompt; by default the first whose answers have different rewards")
    ] = None,
    answer: Annotated[
        int | None, typer.Option(help="number of the answer shown by token; by default the one with the largest share")
    ] = None,
    explain: Annotated[bool, typer.Option("--explain", help="say what each stage does")] = False,
    root: Root = RUNS,
    trust: Trust = False,
    as_json: Json = False,
) -> None:
    """Follow one prompt of a stored step from its tokens to the loss: what each stage made of it, and each token's part.

    Example: hone trace demo --step 10 --explain
    """
    from hone.apps.lab.replay.stored import load_step
    from hone.apps.lab.replay.trace import trace

    traced = trace(load_step(find_run(run, root).path, step), prompt)
    numbers = sorted({sequence.index for sequence in traced.sequences})
    if answer is not None and answer not in numbers:
        fix = f"one of {', '.join(map(str, numbers))}"
        raise HoneError(f"the prompt has no answer {answer}", where="--answer", fix=fix, code="E-runs")
    if as_json:
        print_json(traced.as_json())
    else:
        _print_trace(traced, answer, explain=explain)


def _visible(text: str) -> str:
    """Return text with control characters but newlines escaped: those of a dataset or a model do nothing to a terminal."""
    return "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text)


def _aligned(rows: list[tuple[str, ...]]) -> str:
    """Return rows as lines: every column but the last is right-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join([*map(str.rjust, row[:-1], widths), row[-1]]) for row in rows)


def _print_trace(traced: PromptTrace, answer: int | None, *, explain: bool) -> None:
    console = new_console()
    choices = [sequence for sequence in traced.sequences if answer in (None, sequence.index)]
    shown = max(choices, key=lambda one: one.share)
    print_plain(console, f"step {traced.step}, prompt {_visible(traced.uid)}: {traced.prompt_tokens} tokens")
    print_plain(console, _visible(traced.prompt.strip()) + "\n")
    width = max(len(stage.name) for stage in traced.stages)
    for stage in traced.stages:
        print_plain(console, f"{stage.name:<{width}}  {stage.says}".rstrip())
        if explain and stage.about:
            print_plain(console, f"{'':<{width}}  {stage.about}", style="dim")
    rows = [("answer", "tokens", "score", "advantage", "new/old", "gradient", "text")]
    for one in traced.sequences:
        ratio = "" if one.ratio is None else f"{one.ratio[0]:.4f}..{one.ratio[1]:.4f}"
        numbers = (f"{len(one.tokens)}", f"{one.score:.4g}", f"{one.advantage:.4g}", ratio, f"{one.share:.2%}")
        label = f"{one.index}.{one.part}" if one.part else f"{one.index}"
        rows.append((label, *numbers, _visible(" ".join(one.text.split())[:60])))
    print_plain(console, "\n" + _aligned(rows))
    print_plain(console, f"\nanswer {shown.index} by token; loss of the step's mini-batches: {traced.loss:.4g}")
    names = [name for name in shown.tokens[0] if name != "text"] if shown.tokens else []
    rows = [(*(_SHORT.get(name, name) for name in names), "token")]
    rows += [(*(f"{token[name]:.4g}" for name in names), repr(token["text"])[1:-1]) for token in shown.tokens]
    print_plain(console, _aligned(rows))
    print_plain(console, _TRACE_LEGEND)


_SHORT = {
    "rollout_log_probs": "engine",
    "old_log_probs": "old",
    "ref_log_probs": "ref",
    "values": "value",
    "token_level_rewards": "reward",
    "advantages": "advantage",
    "ratio": "new/old",
}
_TRACE_LEGEND = """gradient: share of the step's gradient by log-probs
mask: 1 on tokens that the policy sampled; engine, old, ref: log-probs of the engine, of the trainer before the update, of the reference
new/old: probability of the token in the last update that saw it, over that before the update
derivative: of the loss by the token's log-prob, at the weights before the step; below 0 makes the token likelier"""


def oracle(
    run: Annotated[Path, typer.Argument(help="run directory")],
    step: Annotated[int, typer.Option("--step", help="a step of trainer.save_microbatch_steps", min=1)],
    trust: Trust = False,
    as_json: Json = False,
) -> None:
    """Recompute a micro-batch that a run saved, and print where the run diverges from it.

    Each sequence is computed alone with eager attention in float64 on the CPU: layers, log-probs, loss, gradients. Needs about
    24 bytes of memory per parameter. Exit code 0 if the run agrees up to rounding, 1 if it diverges.
    """
    from hone.apps.lab.oracle import as_json as plain
    from hone.apps.lab.oracle import compare, show
    from hone.training.microbatches import load_micro_batch

    result = compare(load_micro_batch(run, step))
    if as_json:
        print_json(plain(result))
    else:
        show(result, new_console())
    if result.first is not None:
        raise typer.Exit(1)


app = new_group("Continue recorded episodes.")
_BAR = 20


@app.command("fork")
def fork(
    run: RunName,
    uid: Annotated[str, typer.Argument(help="dataset row of the episode, such as train:17")],
    turn: Annotated[
        int | None, typer.Option(help="fork before this turn of the policy, from 0; by default every turn")
    ] = None,
    samples: Annotated[int, typer.Option(help="continuations of each fork", min=1)] = 8,
    step: Annotated[
        int | None, typer.Option(help="step of the episode; by default the latest that is recorded")
    ] = None,
    index: Annotated[int | None, typer.Option(help="number of the episode in its group; by default the first")] = None,
    model: Annotated[
        str | None, typer.Option(help="model that continues; by default the run's newest checkpoint")
    ] = None,
    content: Annotated[
        str | None,
        typer.Option("--result", help="replace the last tool result or message before the turn by this text"),
    ] = None,
    temperature: Annotated[float | None, typer.Option(help="of the continuations; by default the run's")] = None,
    seed: Annotated[int, typer.Option(help="of the continuations")] = 1,
    png: Annotated[Path | None, typer.Option(help="draw the success by turn into this picture")] = None,
    root: Root = RUNS,
    trust: Trust = False,
    as_json: Json = False,
) -> None:
    """Continue a recorded episode from its exact tokens, and show the success before and after each turn.

    A turn after which the success is lower was a mistake; one after which it is higher decided the episode.
    Example: hone episode fork runs/hone/agent train:17 --samples 16 --png forks.png
    """
    from dataclasses import asdict

    from hone.apps.lab.forks import ForkRequest
    from hone.apps.lab.forks import fork as play

    request = ForkRequest(run, uid, root, turn, samples, step, index, model, content, temperature, seed)
    episode = play(request)
    if png is not None:
        from hone.apps.lab.forks import draw

        with disk_errors(png):
            draw([(f.turn, f.success, f.interval) for f in episode.forks], f"row {uid}, step {episode.step}", png)
    if as_json:
        print_json({**asdict(episode), "forks": [f.as_json() for f in episode.forks]})
    else:
        _print(episode)


def _print(episode: ForkedEpisode) -> None:
    score = "no verdict" if episode.score is None else f"score {episode.score:g}"
    typer.echo(f"row {episode.uid}, episode {episode.index} of step {episode.step}: {score}")
    before: float | None = None
    for fork in episode.forks:
        low, high = fork.interval
        change = "" if before is None else f" ({fork.success - before:+.2f})"
        bar = "#" * round(_BAR * fork.success) if fork.passed else ""
        count = f"{sum(fork.passed)}/{len(fork.passed)}"
        typer.echo(
            f"\nbefore turn {fork.turn}: success {fork.success:.2f}{change}  {count}, 95 % in {low:.2f}..{high:.2f}  {bar}"
        )
        if fork.text:
            typer.echo(f"  turn {fork.turn}: {' '.join(fork.text.split())[:200]}")
        before = fork.success
