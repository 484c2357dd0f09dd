"""The conformance suite of training backends: a backend trains, infers, exports and saves as one plain process does.

A member is a subclass in a test module, with the backend's strategy and the layouts that it supports. The oracle is
:mod:`support.plain_training`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from peft import PeftModel
from support import backend_checks as checks
from support.backend_cases import CPU, SEED, Case, Outcome, train
from support.examples import examples
from support.plain_training import alone
from support.ranks import Ranks

from hone.models.loading import load_policy

TOLERANCE = 1e-5
ROUNDING = 2e-6
"""Error of a log-prob of a few units in float32."""
LORA = {"lora_rank": 4}
STEADY = {"eps": 1e-4}
"""AdamW that does not turn a gradient's rounding into a step, for gradients of which some numbers are almost zero."""

CASES: dict[str, dict[str, Any]] = {
    "policy": {},
    "critic": {"kind": "value"},
    "lora": {"model_settings": LORA, "optim": STEADY},
    "gradient checkpointing": {"model_settings": {"enable_gradient_checkpointing": True}},
    "another optimizer": {
        "optim": {"lr": 0.03, "optimizer": "SGD", "override_optimizer_config": {"momentum": 0.9}},
    },
    "muon": {"optim": {"optimizer": "Muon"}},
    "muon, lora": {"model_settings": LORA, "optim": {"optimizer": "Muon"}},
    "muon, critic": {"kind": "value", "optim": {"optimizer": "Muon"}},
    "parameter groups": {
        "optim": {
            "param_groups": [
                {"params": "embed_tokens", "lr_mult": 0.1, "weight_decay": 0.5},
                {"params": r"layers\.0\.", "lr_mult": 2},
            ]
        }
    },
    "clip_cov": {"loss_mode": "clip_cov"},
    "kl_cov": {"loss_mode": "kl_cov"},
    "m2po": {"loss_mode": "m2po"},
    "prefix trees": {"trees": True},
    "prefix trees, lora": {"trees": True, "model_settings": LORA, "optim": STEADY},
    "prefix trees, critic": {"trees": True, "kind": "value"},
}


@dataclass(frozen=True)
class Ways:
    """How a model is held.

    Attributes:
        world: processes.
        parallel: sizes and further settings, as in the configuration.
    """

    world: int = 1
    parallel: dict[str, Any] = field(default_factory=dict)


Run = Callable[..., list[Any]]


class TrainBackendConformance:
    """Subclasses name a backend and its layouts."""

    strategy: ClassVar[str]
    layouts: ClassVar[dict[str, Ways]]
    without: ClassVar[frozenset[str]] = frozenset()
    """What the backend refuses: ``adapters``, ``other optimizers`` than Adam, ``averages`` of the weights."""

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Each test runs with each layout; those of several processes are long."""
        if "layout" in metafunc.fixturenames:
            values = [
                pytest.param(
                    name,
                    marks=[pytest.mark.long("hone/training/backends", "hone/training/engine.py")]
                    if ways.world > 1
                    else [],
                )
                for name, ways in self.layouts.items()
            ]
            metafunc.parametrize("layout", values)
        if "what" in metafunc.fixturenames:
            metafunc.parametrize("what", [name for name, changes in CASES.items() if self.supports(**changes)])

    @classmethod
    def supports(
        cls, model_settings: dict[str, Any] | None = None, optim: dict[str, Any] | None = None, **_: Any
    ) -> bool:
        """Whether the backend trains with these settings of a case."""
        needs = {"adapters"} if "lora_rank" in (model_settings or {}) else set()
        needs |= {"other optimizers"} if "optimizer" in (optim or {}) else set()
        needs |= {"averages"} if "ema_decay" in (optim or {}) else set()
        return not needs & cls.without

    @pytest.fixture
    def run(self, layout: str, request: pytest.FixtureRequest) -> Run:
        """Calls a function on every rank of the layout; its results, by rank."""
        if self.layouts[layout].world == 1:
            return lambda function, *args: [function(*args)]
        ranks: Ranks = request.getfixturevalue({2: "two_ranks", 4: "four_ranks"}[self.layouts[layout].world])
        return ranks.run

    def case(self, layout: str, model: Path, **changes: Any) -> Case:
        """A training of ``model`` by the backend under test."""
        return Case(model, parallel={"strategy": self.strategy, **self.layouts[layout].parallel}, **changes)

    def test_training_equals_the_oracle(self, what: str, layout: str, run: Run, tiny_models: dict[str, Path]) -> None:
        """Losses, gradient norms, weights and log-probs (or values)."""
        case = self.case(layout, tiny_models["tied"], **CASES[what])
        assert_trains_as_one(run, case)

    def test_any_rows_in_any_micro_batches(self, layout: str, run: Run, tiny_models: dict[str, Path]) -> None:
        """Ragged rows, shares of unequal size (one may be empty), micro-batches of any size."""

        @examples(4)
        @given(
            seed=st.integers(0, 1000),
            rows=st.integers(1, 9),
            budget=st.integers(8, 150),
            mode=st.sampled_from(["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"]),
            trees=st.booleans(),
        )
        @example(
            seed=705, rows=1, budget=8, mode="token-mean", trees=False
        )  # gain and KL penalty of the only token cancel
        def check(seed: int, rows: int, budget: int, mode: str, trees: bool) -> None:
            changes = {
                "updates": 1,
                "rows": rows,
                "seed": seed,
                "budget": budget,
                "loss_agg_mode": mode,
                "trees": trees,
            }
            case = self.case(layout, tiny_models["tied"], optim=STEADY, **changes)
            expected, shifted = alone(case), alone(dataclasses.replace(case, shift=ROUNDING))
            for outcome in run(train, case):
                assert_same(outcome, expected, shifted)

        check()

    def test_reference_mode_is_the_model_without_its_adapter(self, layout, run: Run, tiny_models) -> None:
        if not self.supports(model_settings=LORA):
            pytest.skip("no adapters")
        base = alone(Case(tiny_models["tied"], updates=0)).columns["log_probs"]
        case = self.case(layout, tiny_models["tied"], model_settings=LORA)
        for before, reference, after in run(checks.with_and_without_adapter, case):
            torch.testing.assert_close(reference, base, atol=TOLERANCE, rtol=TOLERANCE)
            assert (before - reference).abs().max() > 50 * TOLERANCE
            assert torch.equal(before, after)
        assert all(run(checks.refuses_reference_mode, self.case(layout, tiny_models["tied"])))

    def test_exported_weights(self, layout, run: Run, tiny_models) -> None:
        """``all`` and ``adapter`` by the module's names; ``merged`` is what PEFT merges."""
        case = self.case(layout, tiny_models["tied"], model_settings=LORA | {"lora_alpha": 12}, updates=2)
        expected = alone(case).weights
        for found in run(checks.every_export, case):
            assert found["all"].keys() == expected.keys()
            assert found["adapter"].keys() == {name for name in expected if ".lora_" in name}
            assert all(torch.equal(found["adapter"][name], found["all"][name]) for name in found["adapter"])
            peft = load_policy(case.model_config(), device=CPU, seed=SEED)
            peft.load_state_dict(found["all"], strict=False)
            assert isinstance(peft, PeftModel)
            merged = dict(peft.merge_and_unload().named_parameters())
            assert found["merged"].keys() == merged.keys()
            for name, value in merged.items():
                torch.testing.assert_close(found["merged"][name], value.detach(), atol=1e-6, rtol=0)

    def test_a_shared_module_holds_the_trained_parameters(self, layout, run: Run, tiny_models) -> None:
        case = self.case(layout, tiny_models["tied"])
        expected = alone(case).weights
        for parameters in run(checks.shared, case):
            if parameters is not None:
                assert parameters.keys() == expected.keys()
                for name, value in expected.items():
                    close(parameters[name], value, name=name)

    @pytest.mark.parametrize("settings", [{}, LORA], ids=["whole", "lora"])
    @pytest.mark.parametrize("optim", [{}, {"optimizer": "Muon", "ema_decay": 0.6}], ids=["adamw", "muon and average"])
    def test_a_resumed_training_goes_on_as_if_nothing_had_happened(
        self, settings, optim, layout, run: Run, tiny_models, tmp_path
    ) -> None:
        if not self.supports(settings, optim):
            pytest.skip("not supported")
        case = self.case(layout, tiny_models["untied"], model_settings=settings, optim=optim, updates=2)
        for (weights, losses), (found, again) in zip(
            run(checks.uninterrupted, case), run(checks.interrupted, case, tmp_path), strict=True
        ):
            assert losses == again
            assert weights.keys() == found.keys()
            assert all(torch.equal(found[name], value) for name, value in weights.items())

    def test_rows_are_gathered_from_all_ranks(self, layout, run: Run, tiny_models) -> None:
        case = self.case(layout, tiny_models["tied"], rows=7)
        everyone = run(checks.gathered, case)
        for rows, local, own, size, planned in everyone:
            assert size == planned
            assert len(rows) == 7
            assert rows.objects("uid") == everyone[0][0].objects("uid")
            mine = rows.reorder(local)
            assert mine.objects("uid") == own.objects("uid")
            assert torch.equal(mine.ragged("response_ids").values, own.ragged("response_ids").values)
        assert {row for _, local, *_ in everyone for row in local} == set(range(7))

    def test_an_update_gives_the_outputs_of_its_pass(self, layout, run: Run, tiny_models) -> None:
        for on_the_way, before in run(checks.outputs_on_the_way, self.case(layout, tiny_models["tied"])):
            assert on_the_way.keys() == before.keys() == {"log_probs", "entropy"}
            for name, values in before.items():
                torch.testing.assert_close(on_the_way[name], values, atol=TOLERANCE, rtol=TOLERANCE)

    def test_an_update_without_a_finite_gradient_is_skipped(self, layout, run: Run, tiny_models) -> None:
        case = self.case(layout, tiny_models["tied"])
        expected = alone(case)
        for applied, before, after, (losses, norms) in run(checks.skipped, case):
            assert not applied
            assert all(torch.equal(after[name], value) for name, value in before.items())
            close(losses, expected.losses)
            close(norms, expected.norms, rtol=TOLERANCE)

    def test_a_frozen_model_infers_only(self, layout, run: Run, tiny_models) -> None:
        expected = alone(Case(tiny_models["tied"], updates=0)).columns["log_probs"]
        for log_probs, rate in run(checks.frozen, self.case(layout, tiny_models["tied"])):
            torch.testing.assert_close(log_probs, expected, atol=TOLERANCE, rtol=TOLERANCE)
            assert rate == 0.0

    def test_a_rank_without_rows_keeps_step(self, layout, run: Run, tiny_models) -> None:
        for rows, lengths in run(checks.no_rows, self.case(layout, tiny_models["tied"])):
            assert lengths == {"log_probs": rows, "entropy": rows}

    def test_computation_is_timed_and_the_schedule_is_followed(self, layout, run: Run, tiny_models) -> None:
        optim = {"lr": 0.01, "lr_warmup_steps": 4, "lr_scheduler_type": "constant"}
        for busy, idle, rates in run(checks.clock_and_schedule, self.case(layout, tiny_models["tied"], optim=optim)):
            assert busy > 0.0
            assert idle == 0.0
            assert rates == pytest.approx([0.0025, 0.005, 0.0075, 0.01])


def assert_trains_as_one(run: Run, case: Case) -> None:
    """Every rank's outcome is the oracle's, and training has changed the weights much more than the tolerance."""
    expected = alone(case)
    before = alone(dataclasses.replace(case, updates=0)).weights
    assert max(float((expected.weights[name] - before[name]).abs().max()) for name in before) > 50 * TOLERANCE
    for outcome in run(train, case):
        assert_same(outcome, expected)


def assert_same(found: Outcome, expected: Outcome, shifted: Outcome | None = None) -> None:
    """Both are equal, up to the tolerance and to what rounding of log-probs alone changes, by ``shifted``."""
    close(found.losses, expected.losses, shifted and shifted.losses)
    close(found.norms, expected.norms, shifted and shifted.norms, rtol=TOLERANCE)
    assert found.weights.keys() == expected.weights.keys()
    for name, value in expected.weights.items():
        close(found.weights[name], value, shifted and shifted.weights[name], name=name)
    for name, value in expected.columns.items():
        close(found.columns[name], value, shifted and shifted.columns[name], rtol=TOLERANCE, name=name)


def close(found: Any, expected: Any, shifted: Any = None, *, rtol: float = 0.0, name: str = "") -> None:
    """Equal within the tolerance."""
    found, expected = (torch.as_tensor(value, dtype=torch.float64) for value in (found, expected))
    moved = 0.0 if shifted is None else (torch.as_tensor(shifted, dtype=torch.float64) - expected).abs()
    excess = (found - expected).abs() - (TOLERANCE + rtol * expected.abs() + moved)
    assert found.shape == expected.shape and (excess <= 0).all(), (name, float(excess.max()))
