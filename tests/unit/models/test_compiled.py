"""Compiled layers: no graph break, few versions for many lengths, and the same numbers as without."""

import gc
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from support.families import tiny_model
from support.models import random_batch
from support.simulated_cuda.build import compiler
from support.varlen_reference import register as register_varlen
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch._inductor.cpp_builder import cpp_compiler_search

from hone.config.model import ModelConfig, OptimConfig
from hone.models.attention import varlen
from hone.models.attention.context import Scoring
from hone.models.attention.packed import PackedContext
from hone.models.compiled import _CONTEXTS, CompiledLayers, TraceableContext, compile_layers
from hone.models.heads import PolicyHead
from hone.models.loading import as_policy, layers_of
from hone.models.routing import use_hone_attention
from hone.training.backends.local import LocalBackend
from hone.training.engine import TrainSettings
from hone.training.objectives import imitation_objective

pytestmark = pytest.mark.application(
    "hone/models/compiled.py",
    "hone/models/compiled.py",
    "constraints.txt",
)

CPU = torch.device("cpu")


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


FAMILIES = ("phi3", *map(slow, ("gemma", "gemma2", "granite", "olmo2", "smollm3")))
"""Windows and capped scores, QK norm, joint projections, layers without rotary embedding."""


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def engine(name: str, compiler: str | None, dtype: str = "float32", **settings: Any) -> LocalBackend:
    model = as_policy(tiny_model(name), ModelConfig(**settings), seed=0, trainable=True)
    backend = LocalBackend(model, PolicyHead(), TrainSettings(CPU, optim=OptimConfig(lr=0.0), dtype=dtype))
    if compiler is not None:
        backend._compiled = compile_layers(model, CPU, "always", compiler)
        assert backend._compiled is not None
    return backend


def gradients(backend: LocalBackend, seed: int = 0) -> dict[str, torch.Tensor]:
    backend.optimizer.step = lambda step, norm: True
    backend.train_batch(random_batch(6, seed=seed), imitation_objective(), step=0)
    return {name: p.grad for name, p in backend.model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", FAMILIES)
def test_layers_compile_without_a_break_and_compute_the_same(name):
    plain, compiled = engine(name, None), engine(name, "aot_eager")
    expected, results = gradients(plain), gradients(compiled)
    assert expected.keys() == results.keys() and len(expected) > 10
    for parameter, gradient in expected.items():
        torch.testing.assert_close(results[parameter], gradient, atol=2e-6, rtol=1e-4)
    assert counters["graph_break"] == {} and counters["stats"]["unique_graphs"] >= 1
    assert compiled._compiled.obstacles == {}


@pytest.mark.parametrize(("settings", "dtype"), [
    ({"enable_gradient_checkpointing": True}, "bfloat16"),
    slow({"lora_rank": 2, "enable_gradient_checkpointing": True}, "bfloat16"),
    slow({"enable_gradient_checkpointing": True, "gradient_checkpointing_keeps": "attention"}, "bfloat16"),
    slow({"lora_rank": 2}, "float32"),
])  # fmt: skip
def test_with_checkpointing_adapters_and_autocast(settings, dtype):
    plain, compiled = engine("phi3", None, dtype, **settings), engine("phi3", "aot_eager", dtype, **settings)
    expected, results = gradients(plain), gradients(compiled)
    assert compiled._compiled.obstacles == {} and counters["graph_break"] == {}
    assert expected.keys() == results.keys() and counters["stats"]["unique_graphs"] in (
        1,
        2,
    )  # inputs of the first layer may need no gradient
    norm = torch.cat([gradient.flatten() for gradient in expected.values()]).norm()
    error = torch.cat([(results[name] - gradient).flatten() for name, gradient in expected.items()]).norm()
    assert error < norm * (2e-2 if dtype == "bfloat16" else 1e-5)


def test_one_version_serves_all_lengths():
    """The first micro-batch compiles the layers; ten others of differing lengths add at most two versions, and leave no context."""
    compiled = engine("phi3", "aot_eager")
    gradients(compiled)
    before = counters["stats"]["unique_graphs"]
    lengths = {
        gradients(compiled, seed) and random_batch(6, seed=seed).ragged("response_ids").values.numel()
        for seed in range(1, 11)
    }
    assert len(lengths) > 5
    assert before == 1 and counters["stats"]["unique_graphs"] - before <= 2
    assert compiled._compiled.obstacles == {}
    gc.collect()  # compiling leaves reference cycles
    assert _CONTEXTS == {}


def test_scoring_and_training_agree():
    compiled, batch = engine("olmo2", "aot_eager"), random_batch(6, seed=3)
    log_probs = compiled.infer_batch(batch)["log_probs"].values
    expected = engine("olmo2", None).infer_batch(batch)["log_probs"].values
    torch.testing.assert_close(log_probs, expected, atol=1e-5, rtol=0)
    assert counters["graph_break"] == {}


def test_a_context_lives_until_the_backward_pass():
    states = [torch.randn(1, 4, 9, 8, requires_grad=True) for _ in range(3)]
    context = PackedContext.from_lengths([4, 5])
    traceable = TraceableContext(context)
    output = traceable.attend(0, *states, Scoring(0.3, window=3))
    del traceable
    gc.collect()
    assert list(_CONTEXTS.values()) == [context]
    output.square().sum().backward()
    results = [x.grad.clone() for x in states]
    for x in states:
        x.grad = None
    context.attend(0, *states, Scoring(0.3, window=3)).square().sum().backward()
    for x, result in zip(states, results, strict=True):
        torch.testing.assert_close(result, x.grad)
    del output
    assert _CONTEXTS == {}


@pytest.mark.parametrize(
    "scoring", [Scoring(0.3), Scoring(0.3, softcap=2.0, window=3), Scoring(0.3, sinks=torch.ones(4))]
)
def test_the_operator_keeps_the_rules_of_torch(scoring):
    query, (key, value) = torch.randn(1, 4, 9, 8), torch.randn(2, 1, 2, 9, 8)
    states = [x.requires_grad_() for x in (query, key.clone().detach(), value.clone().detach())]
    context = TraceableContext(PackedContext.from_lengths([4, 5]))
    options = scoring.sinks, context.number, scoring.scale, scoring.window, scoring.softcap, torch.float32
    torch.library.opcheck(torch.ops.hone.attend.default, (*states, *options))


def test_attention_on_cuda_is_traced_whole(monkeypatch):
    """On the meta device, which counts as a recent GPU: the variable-length call is in the graph, with and without shared prefixes."""
    register_varlen()
    monkeypatch.setattr(varlen, "compute_dtype", lambda states: states.dtype)  # autocast refuses the meta device
    for context in (
        PackedContext.from_lengths([5, 7], "meta"),
        PackedContext.from_lengths([8, 9], "meta", shared=[0, 5]),
    ):
        traceable = TraceableContext(context)
        states = [
            torch.randn(1, heads, 12, 8, device="meta", dtype=torch.bfloat16, requires_grad=True) for heads in (4, 2, 2)
        ]
        graphs = []

        def keep(graph: Any, inputs: Any, graphs: list[Any] = graphs) -> Any:
            graphs.append(graph)
            return make_boxed_func(graph.forward)

        attend = torch.compile(
            lambda *x, context=traceable: context.attend(0, *x, Scoring(0.3)),
            fullgraph=True,
            backend=aot_autograd(fw_compiler=keep),
        )
        output = attend(*states)
        assert output.shape == (1, 12, 4, 8)
        output.sum().backward()
        assert {x.grad.shape for x in states} == {x.shape for x in states}
        assert "varlen" in graphs[0].code and "hone.attend" not in graphs[0].code


def test_only_compiled_passes_use_the_compiled_layers():
    """The native engine's contexts pass through the layers as before."""
    compiled = engine("gemma2", "aot_eager")
    ids = torch.arange(3, 12)[None]
    compiled.model(input_ids=ids, context=PackedContext.from_lengths([9]), use_cache=False)
    assert counters["stats"]["unique_graphs"] == 0


@pytest.mark.parametrize(("name", "changes", "reason"), [
    ("mixtral", {}, "experts"), ("gpt_oss", {}, "experts"), ("gemma2", {"attention_dropout": 0.1}, "dropout"),
])  # fmt: skip
def test_what_cannot_be_compiled_is_named(name, changes, reason, caplog):
    model = tiny_model(name)
    for key, value in changes.items():
        setattr(model.config, key, value)
    with caplog.at_level("WARNING"):
        assert compile_layers(model, CPU, "always", "aot_eager") is None
    (warning,) = [record.getMessage() for record in caplog.records if record.name == "hone.models.compiled"]
    assert "2 layers" in warning and reason in warning


def test_without_a_compiler_the_run_says_so(caplog):
    cpp_compiler_search.cache_clear()
    with torch._inductor.config.patch("cpp.cxx", ("no-such-compiler",)), caplog.at_level("WARNING"):
        assert compile_layers(tiny_model("gemma2"), CPU, "always") is None
    cpp_compiler_search.cache_clear()
    assert "C++ compiler" in caplog.text


def fail(graph: Any, inputs: Any) -> Any:
    raise ValueError("no code for this graph")


def plain_code(graph: Any, inputs: Any) -> Any:
    return make_boxed_func(graph.forward)


@pytest.mark.parametrize("broken", ["graph break", "forward", "backward"])
def test_what_the_compiler_refuses_is_computed_as_before(broken, caplog):
    """Its class is named once, and the numbers are those of the plain layers."""
    model = tiny_model("olmo2")
    use_hone_attention(model)
    compiler = "aot_eager"
    if broken == "graph break":
        for layer in layers_of(model):
            plain = layer.mlp.forward
            layer.mlp.forward = lambda x, plain=plain: plain(x) * (1.0 if float(x.detach().sum()) < 1e9 else 2.0)
    else:
        passes = {"fw_compiler": plain_code, "bw_compiler": plain_code}
        compiler = aot_autograd(**passes | {"fw_compiler" if broken == "forward" else "bw_compiler": fail})
    backend = LocalBackend(model, PolicyHead(), TrainSettings(CPU, optim=OptimConfig(lr=0.0)))
    expected = gradients(backend)
    backend.model.zero_grad()
    backend._compiled = CompiledLayers(layers_of(model), compiler)
    with caplog.at_level("WARNING", "hone"):
        results = gradients(backend)
    warnings = [record for record in caplog.records if record.name == "hone.models.compiled"]
    assert len(warnings) == 1 and list(backend._compiled.obstacles) == ["Olmo2DecoderLayer"]
    assert all(torch.equal(results[name], gradient) for name, gradient in expected.items())


@pytest.mark.parametrize(("choice", "name", "compiles"), [
    ("auto", "gemma2", False), ("never", "gemma2", False), ("always", "gemma2", True), ("always", "qwen3", False),
])  # fmt: skip
def test_who_compiles(choice, name, compiles):
    """On a CPU, `auto` compiles nothing, and a model that fused layers compute is never compiled."""
    assert (compile_layers(tiny_model(name), CPU, choice, "aot_eager") is not None) == compiles


@pytest.mark.slow
@pytest.mark.skipif(compiler() is None, reason="no C++ compiler")
def test_inductor():
    plain, compiled = engine("phi3", None), engine("phi3", "inductor")
    for seed in range(3):
        expected, results = gradients(plain, seed), gradients(compiled, seed)
        for parameter, gradient in expected.items():
            torch.testing.assert_close(results[parameter], gradient, atol=1e-5, rtol=1e-3)
    assert counters["graph_break"] == {} and compiled._compiled.obstacles == {}
