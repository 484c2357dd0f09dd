"""Compile Hone's Triton programs for a GPU that is not there, and print what each takes: `python benchmarks/triton_programs.py`.

The programs are compiled for the architecture (sm_90 is H100 and H200) in the sizes of Qwen3 8B. Registers a thread, shared memory and
spilled bytes are read from the machine code. A program that spills registers ends it with exit code 1. It needs Triton, and no GPU.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import Any, NamedTuple


class Program(NamedTuple):
    """A program with its argument types, and the values that are fixed when it is compiled.

    Pointers have a ``*``. They, and integers with a ``+``, are multiples of 16.
    """

    name: str
    function: Any
    types: str
    fixed: dict[str, Any]
    warps: int = 4
    stages: int = 3


class Resources(NamedTuple):
    """What a compiled program takes: registers a thread, bytes of shared memory a block, spilled bytes a thread."""

    registers: int
    shared: int
    spilled: int


def programs() -> Iterator[Program]:
    """All programs, with bfloat16 activations over a float32 residual stream."""
    from hone.models.kernels.cuda.programs import gates, heads, norms, pages, vocabulary

    norm, warps = {"BLOCK": 4096}, 8
    forward, backward = (
        "*fp32 *bf16 *fp32 *fp32 *bf16 *fp32 i32 fp32",
        "*fp32 *bf16 *fp32 *fp32 *fp32 *fp32 *bf16 *fp32",
    )
    yield Program("add + norm", norms.norm_forward, forward, {"HAS_DELTA": True, **norm}, warps)
    sums = {"HAS_TOTAL": True, "HAS_DELTA": True, **norm}
    yield Program("add + norm, backward", norms.norm_backward, f"{backward} i32 i32+", sums, warps)
    for name, has_norm in (("QK norm + RoPE", True), ("RoPE", False)):
        fixed = {"HALF": 64, "HAS_NORM": has_norm, "HEADS": heads.HEADS, "BLOCK": 64}
        counts = "fp32 i32 i32 i32"
        yield Program(name, heads.heads_forward, f"*bf16 *fp32 *fp32 *fp32 *bf16 *bf16 *bf16 {counts}", fixed)
        states = "*bf16 *bf16 *bf16 *bf16 *fp32 *fp32 *fp32 *bf16 *fp32"
        yield Program(f"{name}, backward", heads.heads_backward, f"{states} {counts} i32", fixed)
    yield Program("SwiGLU", gates.gate_forward, "*bf16 *bf16 i32+", {"BLOCK": gates.BLOCK})
    yield Program("SwiGLU, backward", gates.gate_backward, "*bf16 *bf16 *bf16 i32+", {"BLOCK": gates.BLOCK})
    fixed = dict(vocabulary.ON_A_GPU)
    launch = fixed.pop("num_warps"), fixed.pop("num_stages")
    sizes = "i32 i32+ i32+ fp32 fp32"
    for name, given in (("", False), (" with bias, cap, entropy", True)):
        flags = {"HAS_BIAS": given, "HAS_SOFTCAP": given, "WIDE": False, **fixed}
        states = "*bf16 *bf16 *bf16 *i64 *fp32 *fp32"
        function = vocabulary.vocabulary_statistics
        yield Program(f"vocabulary statistics{name}", function, f"{states} {sizes}", flags, *launch)
        states = "*bf16 *bf16 *bf16 *i64 *fp32 *fp32 *fp32 *fp32 *bf16"
        flags = {"HAS_ENTROPY": given, **flags}
        function = vocabulary.vocabulary_gradient
        yield Program(f"vocabulary gradient{name}", function, f"{states} {sizes}", flags, *launch)
    yield from _of_pages(pages)
    yield Program("vocabulary combine", vocabulary.vocabulary_combine, "*fp32 *fp32 *fp32 i32 i32", vocabulary.COMBINED)


def _of_pages(pages: Any) -> Iterator[Program]:
    """Attention over pages of 256 tokens, also of other models."""
    launch = pages.WARPS, pages.STAGES
    for group, width, kind, extras in (
        (4, 128, "bf16", False),
        (1, 64, "bf16", False),
        (8, 80, "bf16", True),
        (2, 256, "bf16", True),
        (4, 128, "fp32", True),
    ):
        sizes = pages.shape(group, width, 256, 2 if kind == "bf16" else 4)
        flags = {"HAS_SOFTCAP": extras, "HAS_WINDOW": extras, "WIDE": kind == "fp32"}
        states, numbers = f"*{kind} *{kind} *{kind} *i32 *i32 *fp32 *fp32", "fp32 fp32 i32+ i32+ i32+ i32 i32"
        name = f"pages, {width} wide, {kind}{', cap and window' if extras else ''}"
        yield Program(name, pages.pages_parts, f"{states} {numbers}", {**sizes, **flags}, *launch)
    for width, sinks in ((128, False), (256, True)):
        flags = {"HAS_WINDOW": False, "HAS_SINKS": sinks}
        name = f"pages merged, {width} wide{', sinks' if sinks else ''}"
        fixed = {**pages.merged(width, 256), **flags}
        yield Program(name, pages.pages_merge, "*fp32 *fp32 *i32 *fp32 *bf16 i32 i32", fixed)


def compiled(program: Program, architecture: int) -> Resources:
    """Compile a program to machine code and read what it takes."""
    import triton  # pyright: ignore[reportMissingImports]
    from triton.backends.compiler import GPUTarget  # pyright: ignore[reportMissingImports]
    from triton.compiler import ASTSource  # pyright: ignore[reportMissingImports]

    names = [name for name in program.function.arg_names if name not in program.fixed]
    kinds = program.types.split()
    signature = dict(zip(names, (kind.removesuffix("+") for kind in kinds), strict=True))
    signature |= dict.fromkeys(program.fixed, "constexpr")
    aligned = {(place,): [["tt.divisibility", 16]] for place, kind in enumerate(kinds) if "*" in kind or "+" in kind}
    source = ASTSource(fn=program.function, signature=signature, constexprs=program.fixed, attrs=aligned)
    target, options = GPUTarget("cuda", architecture, 32), {"num_warps": program.warps, "num_stages": program.stages}
    code = triton.compile(source, target=target, options=options)
    usage = _resource_usage(code.asm["cubin"])
    return Resources(usage["REG"], code.metadata.shared, usage["STACK"] + usage["LOCAL"])


def _resource_usage(machine_code: bytes) -> dict[str, int]:
    from triton import knobs  # pyright: ignore[reportMissingImports]

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(machine_code)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    line = next(line for line in printed.splitlines() if "REG:" in line)
    return {name: int(value) for name, _, value in (part.partition(":") for part in line.split()) if value.isdigit()}


def main() -> int:
    """Print the table, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--architecture", type=int, default=90, help="compute capability without the dot")
    options = parser.parse_args()
    print(f"compiled for sm_{options.architecture}, run on no GPU\n")
    print("| Program | registers | shared bytes | spilled bytes |\n|---|---|---|---|")
    spilled = 0
    for program in programs():
        used = compiled(program, options.architecture)
        spilled += used.spilled
        print(f"| {program.name} | {used.registers} | {used.shared} | {used.spilled} |")
    if spilled:
        print(f"\n{spilled} bytes are spilled: each is read and written in memory. Fix: smaller blocks or more warps.")
    return int(spilled > 0)


if __name__ == "__main__":
    sys.exit(main())
