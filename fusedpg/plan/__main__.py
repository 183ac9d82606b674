"""``python -m fusedpg.plan COMMAND``: each command is a module of its own."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

# A command's module has `add_arguments(parser)` and `main(arguments)`, which returns the exit
# status. It is imported when the command is called, since some of them import torch.
COMMANDS = {
    "profile": ("fusedpg.plan.profile", "measure a model's operators and this machine's messages"),
    "search": ("fusedpg.plan.command_search", "find the plans that take least time"),
    "explain": ("fusedpg.plan.command_explain", "say what a plan costs, and how it was found"),
    "baseline": ("fusedpg.plan.baseline", "find plans in ways that are not a search"),
    "train": ("fusedpg.plan.train", "train as a plan says"),
    "report": ("fusedpg.plan.report", "compare what was predicted with what was measured"),
}


class _Defaults(argparse.HelpFormatter):
    """Says of each option what it is without being given."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        text = action.help or ""
        given = action.option_strings and action.nargs != 0 and not action.required
        if not given or action.default is None or "default" in text:
            return text
        return f"{text} (default: {action.default})".strip()


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m fusedpg.plan")
    words = sys.argv[1:] if words is None else words
    commands = parser.add_subparsers(dest="command", required=True)
    named = next((word for word in words if not word.startswith("-")), None)
    for name, (module, text) in COMMANDS.items():
        command = commands.add_parser(name, help=text, description=text, formatter_class=_Defaults)
        if name == named:
            importlib.import_module(module).add_arguments(command)
    arguments = parser.parse_args(words)
    try:
        status: int = importlib.import_module(COMMANDS[arguments.command][0]).main(arguments)
    except (ValueError, LookupError, FileNotFoundError) as error:
        # The user's plan, database or arguments are wrong.
        print(f"python -m fusedpg.plan {arguments.command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"python -m fusedpg.plan {arguments.command}: interrupted", file=sys.stderr)
        return 130
    return status


if __name__ == "__main__":
    sys.exit(main())
