"""`hone reward`: try a reward before training with it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hone.cli.options import RUNS, AnswerKey, DataKeys, Json, PromptKey, RewardKey, Root, new_group
from hone.cli.output import new_console, new_table, print_json
from hone.errors import Finding, RewardError
from hone.insight.run_files import disk_errors

if TYPE_CHECKING:
    from hone.apps.lab.rewards.comparison import Comparison
    from hone.config.reward import RewardConfig
    from hone.rewards.bench import Bench

app = new_group("List the built-in scorers; try rewards on answers of known quality.")


@app.command("list")
def list_scorers(
    name: Annotated[str | None, typer.Argument(help="show the details of this scorer")] = None,
    as_json: Json = False,
) -> None:
    """List the built-in scorers: their data sources, options, and where they run.

    Example: hone reward list code
    """
    from hone.rewards.scorers import SCORERS

    scorers = [SCORERS.get(name)] if name else [SCORERS.get(each) for each in SCORERS]
    if as_json:
        print_json([scorer.as_json() for scorer in scorers])
    elif name:
        typer.echo(scorers[0].text)
        typer.echo(_facts(scorers[0].as_json()))
    else:
        for scorer in scorers:
            typer.echo(f"{scorer.name}\n  {scorer.summary}\n{_facts(scorer.as_json())}")
        typer.echo("`hone reward list NAME` shows the details of a scorer.")


@app.command("test", cls=DataKeys)
def test(
    data: Annotated[
        list[str], typer.Option("--data", help="dataset file (parquet, json, jsonl, csv); may be repeated")
    ],
    reward: Annotated[
        str | None, typer.Option(help="reward function as FILE:NAME; by default the built-in scorers")
    ] = None,
    scorer: Annotated[str | None, typer.Option(help="built-in scorer for every row")] = None,
    kwargs: Annotated[
        list[str] | None, typer.Option("--set", help="argument of the reward, name=value; may be repeated")
    ] = None,
    rows: Annotated[int, typer.Option(help="rows to try", min=1)] = 20,
    prompt_key: PromptKey = "prompt",
    answer_key: AnswerKey = None,
    reward_fn_key: RewardKey = "data_source",
    timeout: Annotated[float, typer.Option(help="time limit of one call in seconds")] = 10.0,
    workers: Annotated[int, typer.Option(help="worker processes", min=1)] = 1,
    show: Annotated[int, typer.Option(help="print this many answers of each kind with their scores")] = 0,
    png: Annotated[Path | None, typer.Option(help="write histograms into this picture")] = None,
    output: Annotated[Path | None, typer.Option(help="write every answer with its score to this .jsonl file")] = None,
    as_json: Json = False,
) -> None:
    """Score correct, wrong, garbage, empty, truncated and adversarial answers and wrong types, in the reward's workers.

    Exit code 2 when the reward would harm a run: correct answers score no better than garbage, calls fail or hang, or values
    are not numbers. Example: hone reward test --data train.parquet --reward my_reward.py:compute_score
    """
    import json

    from hone.apps.lab.rewards.bench_report import draw, forms, summary, trial_record
    from hone.data.prompts import scored_rows
    from hone.rewards.bench import bench_findings, run_bench

    config = _config(reward, scorer, kwargs or [], timeout, workers)
    columns = {"prompt_key": prompt_key, "answer_key": answer_key, "reward_fn_key": reward_fn_key}
    bench = run_bench(config, scored_rows(data, limit=rows, **columns), adversarial=True)
    findings = sorted(bench_findings(bench, config), key=lambda finding: not finding.stops)
    if png is not None:
        with disk_errors(png):
            draw(bench, png)
    if output is not None:
        with disk_errors(output):
            output.write_text("".join(json.dumps(trial_record(trial), default=str) + "\n" for trial in bench.trials))
    if as_json:
        result = {
            "kinds": summary(bench),
            "forms": forms(bench),
            "seconds_per_call": bench.seconds_per_call,
            "rows": bench.rows,
            "stopped": bench.stopped,
            "findings": [finding.as_json() for finding in findings],
        }
        print_json(result)
    else:
        _print(bench, findings, show, [path for path in (png, output) if path is not None])
    if any(finding.stops for finding in findings):
        raise typer.Exit(2)


@app.command("diff")
def diff(
    old: Annotated[
        str, typer.Argument(help="FILE:NAME of a function, the name of a scorer, or `stored`: the run's scores")
    ],
    new: Annotated[str, typer.Argument(help="FILE:NAME of a function, or the name of a scorer")],
    run: Annotated[str, typer.Option("--run", help="run directory, or its name below the root")],
    kwargs: Annotated[
        list[str] | None, typer.Option("--set", help="argument of the new reward, name=value; may be repeated")
    ] = None,
    allow: Annotated[
        float, typer.Option(help="share of flipped verdicts, and of reordered pairs, that is allowed")
    ] = 0.0,
    show: Annotated[int, typer.Option(help="episodes to print, those with the largest change first", min=0)] = 5,
    output: Annotated[Path | None, typer.Option(help="write all differing episodes to this .jsonl file")] = None,
    timeout: Annotated[float, typer.Option(help="time limit of one call in seconds")] = 30.0,
    workers: Annotated[int, typer.Option(help="worker processes", min=1)] = 2,
    root: Root = RUNS,
    as_json: Json = False,
) -> None:
    """Score all stored rollouts of a run with two versions of a reward, and show what would have been different.

    Exit code 1 when more than --allow of the verdicts flip or of the orders change.
    Example: hone reward diff stored new_reward.py:compute_score --run runs/hone/demo
    """
    import json

    from hone.apps.lab.rewards.comparison import STORED, compare, rescore_run

    configs = [
        None if name == STORED else _config_of(name, settings, timeout, workers)
        for name, settings in ((old, []), (new, kwargs or []))
    ]
    comparison = compare(rescore_run(run, root, *configs))
    if output is not None:
        with disk_errors(output):
            output.write_text("".join(json.dumps(d.as_json(), default=str) + "\n" for d in comparison.differences))
    if as_json:
        counts = {"episodes": comparison.episodes, "groups": comparison.groups}
        shown = [difference.as_json() for difference in comparison.differences[:show]]
        print_json({**counts, **comparison.shares(), "differences": shown})
    else:
        _print_comparison(comparison, show)
    if max(comparison.flipped, comparison.reordered_pairs) > allow:
        raise typer.Exit(1)


def _facts(scorer: dict[str, Any]) -> str:
    options = ", ".join(f"{option}={value!r}" for option, value in scorer["options"].items()) or "none"
    package = f"\n  needs the package {scorer['package']}" if scorer["package"] else ""
    return f"  data_source: {', '.join(scorer['data_sources'])}\n  options: {options}\n  runs {scorer['runs']}{package}"


def _config(reward: str | None, scorer: str | None, settings: list[str], timeout: float, workers: int) -> RewardConfig:
    import yaml

    from hone.config.reward import CustomRewardConfig, RewardConfig

    options = {}
    for setting in settings:
        name, sign, value = setting.partition("=")
        if not sign:
            raise RewardError(f"'{setting}' has no value", where="--set", fix="--set name=value")
        options[name] = yaml.safe_load(value)
    custom = CustomRewardConfig.named(reward)
    if reward:
        custom.reward_kwargs = options
    return RewardConfig(
        custom_reward_function=custom,
        scorer=scorer,
        scorer_kwargs={} if reward else options,
        timeout=timeout,
        num_workers=workers,
    )


def _config_of(name: str, settings: list[str], timeout: float, workers: int) -> RewardConfig:
    is_function = ":" in name or name.endswith(".py")
    return _config(name if is_function else None, None if is_function else name, settings, timeout, workers)


def _print_comparison(comparison: Comparison, show: int) -> None:
    typer.echo(f"{comparison.episodes} episodes in {comparison.groups} groups")
    for label, value in (
        ("verdicts that flip", comparison.flipped),
        ("pairs in another order", comparison.reordered_pairs),
        ("groups with such a pair", comparison.reordered_groups),
        ("advantages with another sign", comparison.advantage_signs),
        ("tokens with another advantage", comparison.tokens),
        ("past gradient that would differ", comparison.gradient),
    ):
        typer.echo(f"  {label:32} {value:7.1%}")
    for difference in comparison.differences[:show]:
        episode = difference.episode
        scores = " -> ".join("no verdict" if score is None else f"{score:g}" for score in (episode.old, episode.new))
        signed = " -> ".join(
            "left out" if advantage is None else f"{advantage:+.2f}"
            for advantage in (difference.old_advantage, difference.new_advantage)
        )
        typer.echo(f"\nstep {episode.step}, row {episode.uid}, episode {episode.index}: {scores}, advantage {signed}")
        typer.echo(f"    {episode.text[-300:]!r}")


def _print(bench: Bench, findings: list[Finding], show: int, written: list[Path]) -> None:
    from hone.apps.lab.rewards.bench_report import forms, summary, text_histogram
    from hone.rewards.probes import KINDS

    table = new_table("answers", "calls>", "failed>", "least>", "mean>", "greatest>")
    for row in summary(bench):
        numbers = ["" if row[name] is None else f"{row[name]:.3g}" for name in ("min", "mean", "max")]
        table.add_row(row["kind"], str(row["calls"]), str(row["failed"]) if row["failed"] else "", *numbers)
    new_console().print(table)
    typer.echo("correct answers by form: " + ", ".join(f"{form} {mean:.2g}" for form, mean in forms(bench).items()))
    typer.echo("\nrewards of correct, wrong, garbage, empty and truncated answers")
    typer.echo("\n".join(text_histogram(bench.totals("golden", "wrong", "garbage", "empty", "truncated"))))
    typer.echo(f"\n{len(bench.trials)} calls over {bench.rows} rows, {1000 * bench.seconds_per_call:.3g} ms per call")
    for kind in KINDS if show else ():
        for trial in bench.of_kinds(kind)[:show]:
            got = f"{trial.score.total:g}" if trial.score.error is None else trial.score.error
            typer.echo(
                f"\n{kind} ({trial.probe.form}), ground truth {str(trial.probe.sample.ground_truth)[:60]!r}: {got}"
            )
            typer.echo(f"    {trial.probe.text[:300]!r}")
    for path in written:
        typer.echo(f"wrote {path}")
    for finding in findings:
        typer.echo(f"\n{finding.severity} {finding.error.render()}")
    if not findings:
        typer.echo("no problems with this reward")
