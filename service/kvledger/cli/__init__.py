"""The command `kvledger`."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence

from kvledger import __version__
from kvledger.log import quiet_grpc

_USAGE = """\
kvledger {version}: streams tokens of a language model and keeps the books of their KV memory.

  kvledger serve      serve a model over gRPC           (kvledger serve --help)
  kvledger chat       talk to a server in the terminal
  kvledger generate   send one prompt to a server
  kvledger ledger     show who has which part of the KV memory of a server
  kvledger top        watch a server: who fills its memory, what limits it, does it get worse
  kvledger diagnose   what limits a server now, what to change first, and what would not help
  kvledger explain    where the time of a request went
  kvledger health     ask a server how it is, for probes
  kvledger models     list the models known by name; `kvledger models fetch` downloads one
  kvledger plan       what a model takes, how many sequences fit, how fast it can be at most
  kvledger simulate   what these settings would do with that traffic, in seconds and without a model
  kvledger tenants    who may call: add, list, rotate, revoke, remove, set, group, gateway
  kvledger statement  what the receipts that servers kept come to, and what stood idle
  kvledger report     a page about what servers recorded: memory, time, limits, costs
  kvledger doctor     check this machine, the model and the port, and say what to mend;
                      --isolation: whether a running server keeps its tenants apart
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command that the first argument names; returns the exit status."""
    quiet_grpc()
    try:
        status = _run(list(sys.argv[1:] if arguments is None else arguments))
        print(end="", flush=True)  # a reader who has gone shows itself here, not at the exit
        return status
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # who reads the output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def _run(arguments: Sequence[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(_USAGE.format(version=__version__), end="")
        return 0
    if arguments[0] == "--version":
        print(__version__)
        return 0
    command = _command(arguments[0])
    if command is None:
        print(f"kvledger: no command {arguments[0]!r}; see kvledger --help", file=sys.stderr)
        return 2
    return command(arguments[1:])


def _command(name: str) -> Callable[[Sequence[str]], int] | None:
    """The function of a command; imported only when asked for, because torch takes seconds."""
    if name == "serve":
        from kvledger.cli.serve import run
    elif name == "chat":
        from kvledger.cli.chat import run
    elif name == "generate":
        from kvledger.cli.generate import run
    elif name == "health":
        from kvledger.cli.health import run
    elif name == "ledger":
        from kvledger.cli.ledger import run
    elif name == "top":
        from kvledger.cli.top import run
    elif name == "diagnose":
        from kvledger.cli.diagnose import run
    elif name == "explain":
        from kvledger.cli.explain import run
    elif name == "models":
        from kvledger.cli.models import run
    elif name == "tenants":
        from kvledger.cli.tenants import run
    elif name == "plan":
        from kvledger.cli.plan import run
    elif name == "simulate":
        from kvledger.cli.simulate import run
    elif name == "statement":
        from kvledger.cli.statement import run
    elif name == "report":
        from kvledger.cli.report import run
    elif name == "doctor":
        from kvledger.cli.doctor import run
    else:
        return None
    return run
