"""Constrained decoding by the library llguidance: constraints compiled to matchers, and the tokens that each allows next.

A matcher follows one response. Its mask has a bit for every token of the vocabulary: 1 if the response can still be completed after
it. llguidance bounds the work and memory of compilation and of every step (:data:`LIMITS`), so no constraint can stop an engine.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from threading import Lock
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from hone.errors import ConfigError, RequestError
from hone.extras import install_command
from hone.generation.constraints import choices_of, refused_constraint, schema_of, with_compact_whitespace
from hone.generation.protocol import Constraint, ConstraintKind, SamplingParams

LIMITS = {
    "max_grammar_size": 50_000,
    "max_lexer_states": 20_000,
    "max_items_in_row": 1_000,
    "step_max_items": 10_000,
    "verbose_errors": False,
}
"""llguidance's limits, lower than its defaults. Those allow 13 s of compilation, 0.7 s for one token, and 500 MB."""
MAX_COMPILED = 64
"""Maximum of compiled constraints that an engine keeps, the latest ones."""
_BITS = torch.arange(32, dtype=torch.int32)


def library() -> Any:
    """Return the module llguidance."""
    try:
        import llguidance
    except ImportError as error:
        raise ConfigError(
            "a constraint on responses needs the package llguidance, which is not installed",
            why="it computes which tokens may follow",
            fix=install_command("constraints"),
        ) from error
    return llguidance


def lark_of(constraint: Constraint) -> str:
    """Return a constraint as a grammar in llguidance's dialect of Lark.

    Raises:
        RequestError: the constraint is not of its kind's form.
    """
    if constraint.kind is not ConstraintKind.GRAMMAR:
        return f"start: {expression_of(constraint)}"
    library()
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        return any_to_lark(constraint.text)
    except Exception as error:  # the converter raises plain exceptions
        raise _not_compiled(constraint, str(error)) from error


def expression_of(constraint: Constraint) -> str:
    """Return a constraint of another kind than a grammar as an expression, the right side of a rule of Lark.

    Raises:
        RequestError: the constraint is not of its kind's form, or a grammar.
    """
    match constraint.kind:
        case ConstraintKind.JSON_SCHEMA:
            return json_expression(schema_of(constraint))
        case ConstraintKind.JSON_OBJECT:
            return json_expression({"type": "object"})
        case ConstraintKind.REGEX:
            return f"/{library().regex_to_lark(constraint.text)}/"
        case ConstraintKind.CHOICE:
            return " | ".join(map(json.dumps, choices_of(constraint)))
        case ConstraintKind.GRAMMAR:
            raise refused_constraint(constraint, "cannot be part of a larger answer", "another kind of constraint")


def json_expression(schema: Any) -> str:
    """Return a JSON schema as an expression of Lark."""
    return f"%json {json.dumps(with_compact_whitespace(schema))}"


def check_compiles(constraint: Constraint) -> None:
    """Check that a constraint compiles, without a tokenizer. It takes up to a second, mostly without the interpreter."""
    ll = library()
    is_error, messages = ll.LLMatcher.validate_grammar_with_warnings(
        _compilable(constraint), limits=ll.LLParserLimits(**LIMITS)
    )
    if is_error:
        raise _not_compiled(constraint, messages[0])


class RowGrammar:
    """Follows one response.

    Args:
        matcher: of the constraint, at its start.
        stops: tokens that may end the response where the constraint is satisfied.
    """

    def __init__(self, matcher: Any, stops: Sequence[int]) -> None:
        self.matcher, self.stops = matcher, stops
        self.is_complete = False
        """True if the constraint is satisfied and neither a token nor a stop token can follow."""

    def accept(self, token: int) -> None:
        """Append a token that the mask allows, except for a stop token.

        Raises:
            RequestError: llguidance has reached a limit.
        """
        if not self.matcher.consume_token(token):
            raise self.failure()

    def failure(self) -> RequestError:
        """Return the error of a response that cannot continue."""
        problem = self.matcher.get_error() or "no token of the vocabulary can follow"
        return RequestError(
            f"the constraint cannot be followed any further: {_short(problem)}",
            why="the response is not complete",
            fix="a simpler constraint",
            field="constraint",
        )


class Grammars:
    """Compiled constraints of one tokenizer.

    Args:
        vocabulary: number of logits.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, vocabulary: int) -> None:
        self._tokenizer, self.vocabulary = tokenizer, vocabulary
        self._compiled: OrderedDict[Constraint, Any] = OrderedDict()
        self._lock = Lock()

    @cached_property
    def _thread(self) -> ThreadPoolExecutor:
        """The thread in which constraints are compiled, one at a time and in the order of requests."""
        return ThreadPoolExecutor(1, "hone-grammars")

    @cached_property
    def _tokens(self) -> Any:
        """The vocabulary as llguidance's prefix tree; takes about a second for a large one."""
        from llguidance.hf import from_tokenizer

        size = max(self.vocabulary, len(self._tokenizer))
        try:
            return from_tokenizer(self._tokenizer, n_vocab=size, eos_token=self._tokenizer.eos_token_id or 0)  # type: ignore[arg-type]
        except ValueError as error:
            raise RequestError(
                f"a constraint needs a fast tokenizer, not {type(self._tokenizer).__name__}: {error}",
                why="the tokens that may follow are found in its vocabulary",
                fix="a model with tokenizer.json",
                field="constraint",
            ) from error

    @cached_property
    def _executor(self) -> Any:
        return library().LLExecutor(num_threads=max(1, len(os.sched_getaffinity(0))))

    async def start(self, sampling: SamplingParams) -> RowGrammar | None:
        """Return a new follower of a request's constraint, if it has one; without a wait if it was compiled before.

        Raises:
            RequestError: it cannot be compiled, or no token can begin a response.
        """
        if sampling.constraint is None:
            return None
        matcher = self._kept(sampling.constraint)
        if matcher is None:
            loop = asyncio.get_running_loop()
            matcher = await loop.run_in_executor(self._thread, self._compile, sampling.constraint)
        return RowGrammar(matcher.deep_copy(), () if sampling.ignore_eos else sampling.stop_token_ids)

    def _kept(self, constraint: Constraint) -> Any:
        with self._lock:
            if constraint in self._compiled:
                self._compiled.move_to_end(constraint)
            return self._compiled.get(constraint)

    def _compile(self, constraint: Constraint) -> Any:
        """Compile a constraint, in the thread; a request before it may have done so."""
        matcher = self._kept(constraint)
        if matcher is not None:
            return matcher
        ll = library()
        matcher = ll.LLMatcher(self._tokens, _compilable(constraint), log_level=0, limits=ll.LLParserLimits(**LIMITS))
        if not matcher.is_error():
            matcher.compute_bitmask()  # shows a constraint that no text satisfies
        if matcher.is_error():
            raise _not_compiled(constraint, matcher.get_error())
        with self._lock:
            self._compiled[constraint] = matcher
            while len(self._compiled) > MAX_COMPILED:
                self._compiled.popitem(last=False)
        return matcher

    def masks(self, rows: Sequence[RowGrammar]) -> tuple[Tensor, dict[int, RequestError]]:
        """Return the tokens that each response allows next, as bits, and the errors of those that cannot continue, by index.

        Returns:
            ``[rows, words]`` int32 on the CPU; all 0 in a row that is complete or failed.
        """
        from llguidance.numpy import fill_next_token_bitmask_par

        words_per_row = (max(self.vocabulary, len(self._tokenizer)) + 31) // 32
        bits = torch.zeros(len(rows), words_per_row, dtype=torch.int32)
        matchers = [(row.matcher, index) for index, row in enumerate(rows)]
        fill_next_token_bitmask_par(self._executor, matchers, bits.numpy())
        errors: dict[int, RequestError] = {}
        words: Any = bits.numpy().view("uint32")
        ends: int = self._tokens.eos_token
        for index, row in enumerate(rows):
            accepts = not row.matcher.is_error() and row.matcher.is_accepting()
            for token in (ends, *row.stops):
                _set(words[index], token, accepts and token in row.stops)
            if not words[index].any():
                row.is_complete = accepts
                if not accepts:
                    errors[index] = row.failure()
        return bits, errors

    def allowed(self, bits: Tensor) -> Tensor:
        """Return masks as ``[rows, vocabulary]`` bool, on the device of the bits."""
        if bits.device.type == "cpu":  # 15 times as fast there as shifts
            spread = np.unpackbits(bits.numpy().view(np.uint8), axis=1, bitorder="little")
            return torch.from_numpy(spread[:, : self.vocabulary].view(bool))
        return spread_bits(bits)[:, : self.vocabulary]


def _compilable(constraint: Constraint) -> str:
    return library().LLMatcher.grammar_from_lark(lark_of(constraint))


def spread_bits(bits: Tensor) -> Tensor:
    """Return the bits of ``[rows, words]`` int32 as ``[rows, 32 words]`` bool, the lowest bit of a word first."""
    return ((bits[:, :, None] >> _BITS.to(bits.device)) & 1).flatten(1).bool()


def _set(words: Any, token: int, value: bool) -> None:
    if token // 32 >= len(words):
        return
    bit = type(words[0])(1 << token % 32)
    words[token // 32] = words[token // 32] | bit if value else words[token // 32] & ~bit


def _not_compiled(constraint: Constraint, problem: str) -> RequestError:
    if "NoExtension" in problem:
        return refused_constraint(constraint, "is satisfied by no text", "a constraint that some text satisfies")
    return refused_constraint(constraint, f"cannot be compiled: {_short(problem)}", "one that llguidance supports")


def _short(problem: str) -> str:
    return " ".join(problem.partition("<state>")[0].split())[:400]
