"""The page ``docs/detectors.md``, generated from the detectors by ``scripts/make_docs``."""

from __future__ import annotations

from hone.errors import EXIT_STOPPED
from hone.insight.detectors import DETECTORS

_HEAD = f"""# Detectors

<!-- Generated from hone/insight/detectors by scripts/make_docs. Do not edit. -->

Every run of `hone train`, `hone sft`, `hone prefer` and `hone reward-model` reads the metrics of each step by the detectors below. A
detector answers one question. The first step that shows its symptom gives one alert; the detector is then silent until the symptom has been
absent for 20 steps. An alert says what was seen in figures, why it matters, the likely causes in order with the exact keys to
change, and which samples of the archive show it.

An alert is logged, written to `alerts.jsonl` in the run directory (one JSON object a line: `step`, `detector`, `severity`, `what`, `why`,
`causes`, `fix`, `samples` with `step`, `uid` and `index`), counted in `run.json`, and counted for trackers as `insight/alerts` (those about
time and memory as `insight/alerts/machine`). The samples are those of its step, or of the nearest step in the archive. `hone runs samples RUN --step N --uid UID` prints them.

<!-- not run by tests: RUN is a run of yours -->
```bash
hone runs alerts RUN        # what the run reported; --json for programs
hone runs diagnose RUN      # run all detectors over the metrics of any run
```

| Key | Effect |
|---|---|
| `insight.stop_on=[zero_reward,ratio_explosion]` | an alert of these ends the run after its step: the state is saved, the status is `interrupted`, the exit code {EXIT_STOPPED}, and the same command resumes the run |
| `insight.ignore=[slow_steps]` | these do not run |

## Alerts by webhook

```text
export HOOK=https://hooks.slack.com/services/...
hone train ... insight.webhook='${{oc.env:HOOK}}'
hone gate MODEL --suite gate.yaml --webhook $HOOK        # or HONE_WEBHOOK in the environment
```

A POST of JSON goes to that address for each event. `text` is what Slack, Mattermost and compatible services show; programs read the rest:
`event`, `run`, `host`, `at`, and

| `event` | When | Also in it |
|---|---|---|
| `alert` | a detector fired | the object of `alerts.jsonl`, with at most three causes |
| `failed` | an error or a hang ends the run, also before its first step | `error`, `code`, `fix` |
| `ended` | it finished or was interrupted; only with `insight.notify_end=true` | `status`, `reason`, `step` |
| `gate` | `hone gate` has a verdict | the report, `passed` and `conditions` among it |

A run never waits for a delivery, except at its end for at most 15 seconds, and never fails by one. A notice is tried three times of at most
5 seconds (connection refused, time limit, 408, 425, 429, 5xx); other statuses and redirects are final. `run.json` has how many were
`delivered` and `failed`, and why the last one failed; `hone runs show` prints it. The address is a secret: it is redacted in every file, log and
message, and so are credentials in what is sent. A process that is killed from outside, or whose machine is gone, sends nothing: watch for
that from outside, by the age of `metrics.jsonl`. What to do about each event is on the page [for the person on
call](handbook/on-call.md).

## Restarts, and what detectors do not see

The state of detectors belongs to the checkpoint: a resumed run gives the alerts of an undisturbed one. A detector that ended the run
(`insight.stop_on`) starts over: warm-up and baseline start again, and a symptom that lasts ends the run once more.

Detectors do not see a run without progress: the watchdog (`trainer.watchdog_seconds`) ends it ([failures.md](failures.md)). Errors
that need no history, such as tokens with a wrong mask, are invariants and stop the run at once.

## The order of changes

Alerts about an unstable policy advise changes in one order, and leave out what does not apply:

1. batches: fewer updates a batch (`ppo_epochs`, `ppo_mini_batch_size`)
2. clip and KL: `clip_ratio_high`, `use_kl_loss` or the weight of the KL
3. learning rate and warm-up: `optim.lr` halved, `optim.lr_warmup_steps`
4. loss mode: `policy_loss.loss_mode`, `loss_agg_mode`

Change one thing at a time, and compare with `hone runs compare`.

## The table

A figure marked *proposal* is Hone's; the others name their source. Most are relative to the run's earlier steps, because absolute figures differ
between models. Each detector is tested on an injected fault, on random healthy series, and on recorded runs of the examples. They find faults
after they begin; they do not predict them.

| Detector | Question | Fires when | After step | What to change, in order |
|---|---|---|---|---|
"""


def detectors_page() -> str:
    """Return the page as Markdown."""
    rows = [
        " | ".join((f"| `{d.name}`", d.question, d.fires.replace("|", "\\|"), str(d.warm_up), f"{d.changes} |"))
        for d in DETECTORS
    ]
    return _HEAD + "\n".join(rows) + "\n"
