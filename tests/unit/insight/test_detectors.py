"""Detectors: each fires once on its injected fault with figures and keys, and healthy series are silent."""

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pages.detectors import detectors_page
from support.archives import archive

from hone.config.keys import documentation
from hone.config.run import DETECTORS as NAMES
from hone.config.trees import TREES
from hone.insight.detectors import DETECTORS
from hone.insight.detectors.base import Alert, Cause, Detector, Symptom
from hone.insight.detectors.watch import Watch, diagnose_run
from hone.insight.metrics import is_declared
from hone.insight.run_directory import RunDirectory
from hone.insight.run_files import read_alerts, read_run

STEPS, FAULT = 120, 70
"""Steps of a series, and the first step of an injected fault."""
SETTINGS = {
    "data.train_batch_size": 64,
    "data.max_response_length": 512,
    "algorithm.adv_estimator": "grpo",
    "algorithm.norm_adv_by_std_in_grpo": True,
    "actor_rollout_ref.rollout.n": 8,
    "actor_rollout_ref.rollout.multi_turn.enable": True,
    "actor_rollout_ref.rollout.multi_turn.tool_config_path": "tools.yaml",
    "actor_rollout_ref.actor.ppo_mini_batch_size": 16,
    "actor_rollout_ref.actor.ppo_epochs": 2,
    "actor_rollout_ref.actor.clip_ratio": 0.2,
    "actor_rollout_ref.actor.clip_ratio_high": 0.28,
    "actor_rollout_ref.actor.use_kl_loss": False,
    "actor_rollout_ref.actor.optim.lr": 1e-5,
    "actor_rollout_ref.actor.optim.lr_warmup_steps": -1,
    "actor_rollout_ref.actor.optim.lr_warmup_steps_ratio": 0.0,
    "actor_rollout_ref.actor.policy_loss.loss_mode": "vanilla",
    "critic.optim.lr": 1e-5,
}


def healthy(seed: int, steps: int = STEPS) -> list[dict[str, Any]]:
    """Return the metrics of a run that learns: noise of some percent, spikes of a factor of three, a reward that saturates."""
    draw = random.Random(seed)
    rows = []
    for step in range(1, steps + 1):
        done = step / steps
        reward = 0.2 + 0.55 * (1 - math.exp(-3 * done)) + draw.gauss(0, 0.03)
        spike = 3 if draw.random() < 0.02 else 1
        row = {
            "critic/score/mean": reward,
            "critic/score/max": 1.0,
            "critic/score/min": 0.0,
            "critic/advantages/max": draw.uniform(1.5, 2.5),
            "critic/advantages/min": -draw.uniform(1.5, 2.5),
            "critic/vf_explained_var": 0.6 * done + draw.gauss(0.1, 0.1),
            "critic/vf_loss": 0.2 * draw.uniform(0.8, 1.2),
            "critic/returns/max": 1.0,
            "critic/returns/min": 0.0,
            "reward/zero_std_group_ratio": 0.1 + 0.35 * done + draw.gauss(0, 0.04),
            "reward/format/mean": 0.9,
            "actor/entropy": 1.2 * (1 - 0.35 * done) * draw.uniform(0.95, 1.05),
            "actor/grad_norm": 0.5 * draw.lognormvariate(0, 0.25) * spike,
            "actor/ratio/mean": 1 + draw.gauss(0, 0.002),
            "actor/ratio/max": 1.5 + draw.expovariate(1),
            "actor/first_ratio_max_abs_log": 1e-6,
            "actor/pg_clipfrac": abs(draw.gauss(0.02, 0.02)),
            "actor/ppo_kl": draw.gauss(0.001, 0.001),
            "actor/kl_loss": 0.08 * done * draw.uniform(0.9, 1.1),
            "response_length/mean": 200 + 60 * done + draw.gauss(0, 8),
            "response_length/clip_ratio": abs(draw.gauss(0.02, 0.01)),
            "training/rollout_probs_diff_mean": abs(draw.gauss(0.002, 0.0005)),
            "training/rollout_log_probs_diff_mean": abs(draw.gauss(0.006, 0.001)),
            "training/staleness": 0.0,
            "rollout_corr/kl": draw.gauss(0.0005, 0.0005),
            "rollout_corr/rollout_is_eff_sample_size": draw.uniform(0.9, 1.0),
            "tool/calls/mean": 1.5 + draw.gauss(0, 0.1),
            "tool/malformed_rate": abs(draw.gauss(0.02, 0.01)),
            "tool/error_rate": abs(draw.gauss(0.03, 0.01)),
            "perf/throughput": 1000 * draw.uniform(0.6, 1.2),
            "perf/time_per_step": 30 * draw.uniform(0.8, 1.5),
            "perf/driver_overhead_ratio": abs(draw.gauss(0.04, 0.02)),
            "timing_s/gen": 15.0,
            "timing_s/reward": 2.0,
            "perf/cpu_memory_used_gb": 8 + 0.5 * (1 - math.exp(-step / 10)) + draw.uniform(0, 0.02),
            "perf/max_memory_allocated_gb": 40.0,
        }
        if step % 10 == 0:
            row["val-core/gsm8k/acc/mean@1"] = reward + draw.gauss(0, 0.02)
        rows.append({"step": step, **row})
    return rows


def zero_reward(row, since):
    return {"critic/score/mean": 0.0, "critic/score/max": 0.0, "response_length/clip_ratio": 0.75}


def flat_reward(row, since):
    return {"critic/score/mean": 0.4 + 0.001 * (since % 2), "reward/zero_std_group_ratio": 0.9}


def reward_hacking(row, since):
    held_out = {"val-core/gsm8k/acc/mean@1": 0.3} if row["step"] % 10 == 0 else {}
    return {"critic/score/mean": 0.95, "reward/style/mean": 0.9, **held_out}


FAULTS = {
    "zero_reward": zero_reward,
    "flat_reward": flat_reward,
    "zero_gradient": lambda row, since: {"actor/grad_norm": 0.0},
    "ratio_explosion": lambda row, since: {"actor/ratio/mean": 5.2, "actor/ratio/max": 1000.0},
    "clip_fraction": lambda row, since: {"actor/pg_clipfrac": 0.7},
    "policy_kl": lambda row, since: {"actor/ppo_kl": 0.3},
    "reference_kl": lambda row, since: {"actor/kl_loss": 0.5 + 0.1 * since, "critic/score/mean": 0.6 - 0.01 * since},
    "entropy_collapse": lambda row, since: {"actor/entropy": 0.05, "critic/score/mean": 0.3 + 0.001 * (since % 2)},
    "entropy_rise": lambda row, since: {"actor/entropy": 3.0 + 0.1 * since, "critic/score/mean": 0.5 - 0.002 * since},
    "response_length": lambda row, since: {"response_length/clip_ratio": 0.6, "critic/score/mean": 0.5 - 0.002 * since},
    "gradient_spike": lambda row, since: {"actor/grad_norm": 300.0},
    "engine_mismatch": lambda row, since: {"training/rollout_probs_diff_mean": 0.06},
    "critic_lag": lambda row, since: {"critic/vf_explained_var": -0.5},
    "advantage_shift": lambda row, since: {"critic/advantages/max": 40.0},
    "reward_hacking": reward_hacking,
    "tool_calls": lambda row, since: {"tool/malformed_rate": 0.45},
    "slow_steps": lambda row, since: {"perf/throughput": 40.0, "perf/time_per_step": 700.0, "timing_s/reward": 680.0},
    "memory_growth": lambda row, since: {
        "perf/cpu_memory_used_gb": 8.5 * 1.01**since,
        "perf/cpu_memory_used_gb/children": 8.5 * 1.01**since - 8,
    },
}
"""Values of the fault of each detector, ``since`` steps after it began."""
KEYS = {
    "zero_reward": "data.max_response_length=1024",
    "flat_reward": "actor_rollout_ref.rollout.n=16",
    "zero_gradient": "policy_loss.loss_mode",
    "ratio_explosion": "optim.lr=1e-06",
    "clip_fraction": "ppo_mini_batch_size=64",
    "policy_kl": "ppo_epochs=1",
    "reference_kl": "kl_coef=0.01",
    "entropy_collapse": "algorithm.filter_groups.enable=true",
    "entropy_rise": "optim.lr=5e-06",
    "response_length": "data.max_response_length=1024",
    "gradient_spike": "optim.clip_grad=0.25",
    "engine_mismatch": "rollout_is=token",
    "critic_lag": "critic.optim.lr=3.33e-06",
    "advantage_shift": "algorithm.norm_adv_by_std_in_grpo=true",
    "reward_hacking": "use_kl_loss=true",
    "tool_calls": "multi_turn.format",
    "slow_steps": "reward.num_workers=68",
    "memory_growth": "reward.memory_mb=",
}
"""Part of a fix that the alert of each detector must name."""


def with_fault(name: str, seed: int = 0) -> list[dict[str, Any]]:
    """Return a healthy series whose later steps have the fault of a detector."""
    rows = healthy(seed)
    return [row if row["step"] < FAULT else row | FAULTS[name](row, row["step"] - FAULT) for row in rows]


def alerts_of(rows, values=SETTINGS, run=Path("no-such-run")) -> list[Alert]:
    return diagnose_run(run, rows, values)


def test_there_are_eighteen_detectors_with_declared_metrics_and_documented_keys():
    assert tuple(detector.name for detector in DETECTORS) == NAMES == tuple(FAULTS) == tuple(KEYS)
    assert len(NAMES) == 18
    for detector in DETECTORS:
        assert all(map(is_declared, detector.reads)) and detector.question.endswith("?")
    known = {key.path for tree in TREES.values() for key in documentation(tree)}
    assert set(SETTINGS) <= known


@pytest.mark.parametrize("name", NAMES)
def test_a_fault_fires_its_detector_once_within_thirty_steps(name: str):
    alerts = alerts_of(with_fault(name))
    (alert,) = [alert for alert in alerts if alert.detector == name]
    assert FAULT <= alert.step <= FAULT + 30
    assert any(KEYS[name] in cause.fix for cause in alert.causes), alert
    assert any(character.isdigit() for character in alert.what)


@pytest.mark.parametrize(("share", "found"), [(0.3, 1), (0.05, 0)])
def test_calls_that_end_at_their_time_limit_from_the_first_step_on_are_named(share, found):
    rows = [row | {"tool/timeout_rate": share} for row in healthy(0)[:20]]
    alerts = [alert for alert in alerts_of(rows) if alert.detector == "tool_calls"]
    assert len(alerts) == found
    assert all("30%" in alert.what and "multi_turn.tool_timeout=60" in alert.fix for alert in alerts)


@pytest.mark.parametrize(("explained", "factor"), [(-0.2, 3), (-0.9, 10), (-0.05, None), (0.0, None)])
def test_a_critic_worse_than_a_constant_gets_a_smaller_learning_rate(explained, factor):
    rows = healthy(0)
    for row in rows[FAULT:]:
        row["critic/vf_explained_var"] = explained
    found = [alert for alert in alerts_of(rows) if alert.detector == "critic_lag"]
    advised = [cause.fix for alert in found for cause in alert.causes if "critic.optim.lr=" in cause.fix]
    rates = [float(fix.partition("critic.optim.lr=")[2].partition(",")[0]) for fix in advised]
    assert rates == ([] if factor is None else [pytest.approx(1e-5 / factor, rel=0.01)])


@pytest.mark.parametrize("name", NAMES)
def test_every_key_that_a_fix_sets_exists(name: str):
    known = {key.path for tree in TREES.values() for key in documentation(tree)}
    fixes = [cause.fix for alert in alerts_of(with_fault(name)) for cause in alert.causes]
    words = [word.strip(",;()").partition("=")[0] for fix in fixes for word in fix.split() if "=" in word]
    assert words and set(words) <= known, set(words) - known


@settings(max_examples=25, deadline=None)
@given(st.integers(min_value=0, max_value=10**6))
def test_healthy_noise_is_silent(seed: int):
    assert alerts_of(healthy(seed)) == []


RECORDED = sorted((Path(__file__).parent / "healthy_runs").glob("*.json"))


@pytest.mark.parametrize("file", RECORDED, ids=lambda file: file.stem)
def test_recorded_runs_of_the_examples_are_silent(file: Path):
    run = json.loads(file.read_text())
    names = [name for name in run["metrics"] if name != "step"]
    rows = [
        {"step": step} | {name: run["metrics"][name][at] for name in names if run["metrics"][name][at] is not None}
        for at, step in enumerate(run["metrics"]["step"])
    ]
    assert len(rows) >= 16 and alerts_of(rows, run["settings"]) == []


class Flag(Detector):
    """Fires where the metric is 1."""

    name, question, reads, fires, why, cool_down = "flag", "Is it set?", ("flag",), "at 1", "it is a test", 3

    def examine(self, metrics):
        return Symptom("warning", "the flag is 1", (Cause("it was set", "flag=0"),)) if metrics["flag"] else None


@given(st.lists(st.booleans(), max_size=60), st.integers(0, 5))
def test_an_episode_gives_one_alert_and_ends_after_the_cool_down(flags, warm_up):
    class Warm(Flag):
        pass

    Warm.warm_up = warm_up
    detector = Warm({})
    seen = [step for step, flag in enumerate(flags) if detector.observe(step, {"flag": flag}) is not None]
    expected, open_since = [], None
    for step, flag in enumerate(flags):  # slow oracle: the last step with the symptom is more than cool_down steps ago
        if flag and step >= warm_up:
            if open_since is None or step - open_since > Flag.cool_down:
                expected.append(step)
            open_since = step
    assert seen == expected


def test_steps_without_the_metrics_are_not_counted():
    detector = Flag({})
    assert detector.observe(0, {"val-core/x": 1.0}) is None
    assert detector.observe(1, {"flag": 1}) is not None


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"response_length/clip_ratio": 0.75}, ["75%", "data.max_response_length=1024"]),
        ({"episode/end/assistant_turns": 0.6}, ["60%", "multi_turn.max_assistant_turns"]),
        ({"episode/error_rate": 0.4}, ["40%"]),
        ({"reward/no_verdict_rate": 0.3}, ["30%"]),
        ({"tool/calls/mean": 0.0}, ["multi_turn.format"]),
        ({"tool/malformed_rate": 0.15, "tool/unknown_tool_rate": 0.1}, ["15%", "10%"]),
        ({"tool/error_rate": 0.1, "tool/timeout_rate": 0.5}, ["50%", "multi_turn.tool_timeout"]),
        ({"reward/format/mean": 0.04}, ["4%", "reward.scorer"]),
        ({}, ["hone reward test", "data.sampler.name=stages"]),
    ],
)
def test_zero_reward_names_its_cause(changes, words):
    sound = healthy(0)[0] | {"critic/score/mean": 0.0, "critic/score/max": 0.0}
    (alert,) = [
        a for a in alerts_of([sound | changes | {"step": step} for step in (1, 2, 3)]) if a.detector == "zero_reward"
    ]
    assert alert.step == 3 and len(alert.causes) == 1
    assert all(word in f"{alert.causes[0].evidence} {alert.fix}" for word in words)


@pytest.mark.parametrize(
    ("changes", "evidence"),
    [
        ({"actor/first_ratio_max_abs_log": 3.0}, ["first update"]),
        (
            {"training/rollout_probs_diff_mean": 0.02, "training/staleness": 2.0},
            [
                "engine and trainer",
                "2 weight updates old",
                "8 updates",
                "upper clip",
                "KL penalty",
                "learning rate",
                "loss mode",
            ],
        ),
    ],
)
def test_a_ratio_explosion_names_causes_in_the_order_of_tuning(changes, evidence):
    row = healthy(0)[0] | {"actor/ratio/max": 3000.0} | changes
    alert = next(a for a in alerts_of([row]) if a.detector == "ratio_explosion")
    assert [word in cause.evidence for word, cause in zip(evidence, alert.causes, strict=True)] == [True] * len(
        evidence
    )


def test_a_solved_run_may_stop_learning():
    rows = healthy(3)
    solved = {
        "critic/score/mean": 1.0,
        "critic/score/min": 1.0,
        "reward/zero_std_group_ratio": 1.0,
        "actor/grad_norm": 0.0,
    }
    assert alerts_of([row if row["step"] < FAULT else row | solved for row in rows]) == []


def test_length_that_grows_without_reward_is_reported():
    grows = lambda row, since: {"response_length/mean": 230.0 * min(3, 1 + 0.1 * since), "critic/score/mean": 0.5}  # noqa: E731
    rows = [row if row["step"] < FAULT else row | grows(row, row["step"] - FAULT) for row in healthy(0)]
    (alert,) = alerts_of(rows)
    assert alert.detector == "response_length" and "seq-mean-token-sum-norm" in alert.causes[-1].fix


def test_a_gradient_that_is_not_finite_is_reported_at_once():
    (alert,) = alerts_of([row | {"actor/grad_norm": math.nan} if row["step"] == 40 else row for row in healthy(1)])
    assert (alert.detector, alert.step, alert.severity) == ("gradient_spike", 40, "error")


def test_alerts_of_a_supervised_run_name_keys_that_it_has():
    rows = [
        {
            "step": step,
            "train/grad_norm": 50.0 if step == 60 else 0.5,
            "perf/max_memory_allocated_gb": 40.0 + max(0, step - 70),
            "perf/cpu_memory_used_gb": 8.0,
        }
        for step in range(1, STEPS + 1)
    ]
    values = {"optim.lr": 1e-5, "optim.clip_grad": 1.0, "data.max_token_len_per_gpu": 4096, "trainer.save_freq": 5}
    alerts = alerts_of(rows, values)
    assert [alert.detector for alert in alerts] == ["gradient_spike", "memory_growth"]
    fixes = [cause.fix for alert in alerts for cause in alert.causes]
    words = [word.strip(",;()").partition("=")[0] for fix in fixes for word in fix.split() if "=" in word]
    known = {key.path for key in documentation(TREES["sft"])}
    assert {"optim.lr", "optim.clip_grad", "data.max_token_len_per_gpu"} <= set(words) <= known


def test_an_entropy_collapse_never_advises_a_lower_upper_clip():
    alert = next(alert for alert in alerts_of(with_fault("entropy_collapse")) if alert.detector == "entropy_collapse")
    assert SETTINGS["actor_rollout_ref.actor.clip_ratio_high"] == 0.28
    assert not [cause for cause in alert.causes if "clip_ratio_high=" in cause.fix]


def watch(folder: Path, **options) -> Watch:
    directory = RunDirectory(folder)
    directory.start(seed=1, config_yaml="data: {}\n")
    return Watch(directory, SETTINGS, **options)


def test_a_watch_stores_counts_and_stops(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    seen = watch(tmp_path, stop_on=["ratio_explosion"])
    for row in healthy(0, 5):
        assert seen.observe(row["step"], row) == [] and seen.stopped_by is None
    (alert,) = seen.observe(6, healthy(0)[5] | {"actor/ratio/max": 5000.0})
    assert seen.stopped_by is alert
    (record,) = read_alerts(tmp_path)
    assert (record["step"], record["detector"], record["severity"]) == (6, "ratio_explosion", "error")
    assert set(record) == {"step", "detector", "severity", "what", "why", "causes", "fix", "samples"}
    assert read_run(tmp_path)["alerts"] == {"ratio_explosion": 1} and len(caplog.records) == 1
    directory = RunDirectory(tmp_path)
    directory.rewind(5)
    assert read_alerts(tmp_path) == [] and read_run(tmp_path)["alerts"] == {}


def test_an_ignored_detector_does_not_run(tmp_path: Path):
    seen = watch(tmp_path, ignore=["ratio_explosion"])
    assert seen.observe(1, healthy(0)[0] | {"actor/ratio/max": 5000.0}) == []


@pytest.mark.parametrize("name", NAMES)
def test_restored_detectors_give_the_alerts_of_undisturbed_ones(name: str):
    rows = with_fault(name)
    expected, fields = {step: [] for step in range(1, STEPS + 1)}, {}
    detector = next(detector for detector in DETECTORS if detector.name == name)(SETTINGS)
    for row in rows:
        expected[row["step"]] = detector.observe(row["step"], row)
        fields[row["step"]] = json.dumps(detector.state())  # after this step, as a checkpoint has it
    for cut in (5, 30, FAULT - 1, FAULT, FAULT + 1, FAULT + 3, FAULT + 12, STEPS - 1):
        again = type(detector)(SETTINGS)
        again.restore(json.loads(fields[cut]))
        assert json.dumps(again.state()) == fields[cut]
        assert {row["step"]: again.observe(row["step"], row) for row in rows[cut:]} == {
            step: alert for step, alert in expected.items() if step > cut
        }
        assert json.dumps(again.state()) == fields[STEPS]


def test_a_detector_that_ended_the_run_begins_anew(tmp_path: Path):
    seen = watch(tmp_path, stop_on=["zero_reward"])
    rows = with_fault("zero_reward")
    last = next(row["step"] for row in rows if seen.observe(row["step"], row) and seen.stopped_by)
    again = Watch(RunDirectory(tmp_path), SETTINGS, stop_on=["zero_reward"])
    again.restore(json.loads(json.dumps(seen.state())))
    again.observe(last + 1, rows[last])
    assert again.stopped_by is None, "warm-up starts again"
    assert [row["step"] for row in rows[last + 1 :] if again.observe(row["step"], row) and again.stopped_by]


def test_a_validation_that_ends_later_is_read_with_the_next_step(tmp_path: Path):
    seen, detected = watch(tmp_path), []
    for row in with_fault("reward_hacking"):
        held_out = {name: value for name, value in row.items() if name.startswith("val-core/")}
        step = {name: value for name, value in row.items() if name not in held_out and name != "step"}
        detected += [alert.detector for alert in seen.observe(row["step"], step)]
        seen.add_validation(held_out)
    assert detected.count("reward_hacking") == 1


def test_a_hack_that_widens_the_range_of_the_reward_is_seen(tmp_path: Path):
    seen, detected = watch(tmp_path), []
    for step in range(1, 81):
        gain = max(0.0, (step - 30) / 5)  # a term without bound, from step 30 on
        held_out = {"val-core/gsm8k/acc/mean@1": 0.85 - 0.03 * gain} if step % 10 == 0 else {}
        scores = {"critic/score/mean": 1.0 + gain, "critic/score/min": 0.0, "critic/score/max": 1.5 + 3 * gain}
        detected += [alert.detector for alert in seen.observe(step, healthy(step)[0] | scores | held_out)]
    assert "reward_hacking" in detected, "the fall of 0.3 is less than a tenth of the range at the end, 3.1"


def test_an_alert_names_the_samples_of_the_nearest_archived_step(tmp_path: Path):
    seen = watch(tmp_path)
    log_probs = [([-1.0, -1.0], [-1.0, -1.1]), ([-1.0, -1.0], [-1.0, -9.0]), ([-1.0], [-3.0])]
    for step in (1, 4):
        records = [
            {"uid": f"train:{row}", "index": step, "old_log_probs": old, "new_log_probs": new}
            for row, (old, new) in enumerate(log_probs)
        ]
        archive(tmp_path, step, records)
    (alert,) = seen.observe(3, healthy(0)[2] | {"actor/ratio/max": 5000.0})
    assert [(sample["step"], sample["uid"], sample["index"]) for sample in alert.samples] == [
        (4, "train:1", 4),
        (4, "train:2", 4),
        (4, "train:0", 4),
    ]


def test_the_page_is_up_to_date():
    page = Path(__file__).parents[3] / "docs" / "detectors.md"
    assert page.read_text(encoding="utf-8") == detectors_page(), "run scripts/make_docs"
