"""Runs programs on the simulated GPU: started as a script by :mod:`.machine`, with the driver's path and the address of a socket.

The libraries are imported once; each program is a fork of this process. A request is a line of JSON: the call, its words, the files
for its output and its counters, and its directory. The answer is a line with the process id.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any, NoReturn


def main(driver: str) -> None:
    """Load the driver, turn the device on, and serve requests until standard input ends."""
    ctypes.CDLL(driver, ctypes.RTLD_GLOBAL)  # before torch, which looks its hooks up once
    from support.simulated_cuda.device import turn_on

    turn_on()
    import support.warm  # noqa: F401  the imports of the programs

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        request = json.loads(line)
        if "wait" in request:
            _, status = os.waitpid(request["wait"], 0)
            reply: dict[str, Any] = {"code": os.waitstatus_to_exitcode(status)}
        else:
            process = os.fork()
            if process == 0:
                _become(**request)
            reply = {"process": process}
        answers.write(json.dumps(reply) + "\n")
        answers.flush()


def _become(program: str, words: list[str], log: str, counters: str, directory: str) -> NoReturn:
    """Run a program in this process, write its counters, and exit with its code."""
    import importlib

    from support.simulated_cuda.counters import COUNTERS

    os.setpgid(0, 0)
    os.chdir(directory)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for number, path in ((0, os.open(os.devnull, os.O_RDONLY)), (1, output), (2, output)):
        os.dup2(path, number)
    sys.argv = ["hone", *words]
    code = 1
    try:
        module, _, function = program.partition(":")
        getattr(importlib.import_module(module), function)(words)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            sys.stderr.write(f"{end.code}\n")
    except BaseException:  # noqa: BLE001 - as Python itself ends with it
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        Path(counters).write_text(COUNTERS.to_json())
        os._exit(code)


if __name__ == "__main__":
    main(sys.argv[1])
