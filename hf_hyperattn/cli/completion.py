"""`hyperattn completion`: a script for a shell, made of the parser; this module imports nothing of the package."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable

from hyperattn_cli import COMMANDS, Parser, build_parser, patch_names

#: Options whose values are names of mechanisms.
NAMES = ("--mechanism", "--mechanisms")

BASH = """\
_hyperattn() {{
    local word="${{COMP_WORDS[COMP_CWORD]}}" before="${{COMP_WORDS[COMP_CWORD-1]}}" words=""
    if [ "$COMP_CWORD" -eq 1 ]; then words="{commands}"; else
    case "${{COMP_WORDS[1]}} $before" in
{values}
    *) case "$word" in -*) case "${{COMP_WORDS[1]}}" in
{options}
       esac;; esac;;
    esac; fi
    COMPREPLY=($(compgen -W "$words" -- "$word"))
}}
complete -o default -F _hyperattn hyperattn
"""
#: What lets zsh run a script for bash.
ZSH = "#compdef hyperattn\nautoload -U +X bashcompinit && bashcompinit\n"


def run(args: argparse.Namespace) -> None:
    """Print the script."""
    (commands,) = (a for a in build_parser()._actions if isinstance(a, argparse._SubParsersAction))
    script = SCRIPTS[args.shell](dict(commands.choices))
    print(
        json.dumps({"shell": args.shell, "script": script}, indent=2) if args.json else script,
        end="",
    )
    if args.json:
        print()


def allowed(action: argparse.Action) -> list[str]:
    """The words that an option or argument takes, where they are few."""
    if action.choices:
        return [str(word) for word in action.choices]
    return patch_names() if any(option in NAMES for option in action.option_strings) else []


def bash(commands: dict[str, Parser]) -> str:
    """For bash; after a word for which nothing is known, files."""
    values, options = [], []
    for name, parser in commands.items():
        for action in filter(allowed, parser._actions):
            places = [f'"{name} {option}"' for option in action.option_strings] or [
                f'"{name} {name}"'
            ]
            values.append(f'    {"|".join(places)}) words="{" ".join(allowed(action))}";;')
        options.append(f'           {name}) words="{" ".join(parser._option_string_actions)}";;')
    return BASH.format(
        commands=" ".join(commands), values="\n".join(values), options="\n".join(options)
    )


def fish(commands: dict[str, Parser]) -> str:
    """For fish, with the lines of help."""
    lines = []
    for name in commands:
        about = (COMMANDS[name].__doc__ or "").partition("\n")[0]
        lines.append(
            f"complete -c hyperattn -n __fish_use_subcommand -f -a {name} -d {quoted(about)}"
        )
    for name, parser in commands.items():
        inside = f"complete -c hyperattn -n '__fish_seen_subcommand_from {name}'"
        for action in parser._actions:
            longs = [
                f"-l {option[2:]}" for option in action.option_strings if option.startswith("--")
            ]
            words = f" -x -a {quoted(' '.join(allowed(action)))}" if allowed(action) else ""
            needs = " -r" if not words and longs and action.nargs != 0 else ""
            if longs or words:
                lines.append(
                    f"{inside} {' '.join(longs)}{words}{needs} -d {quoted(action.help or '')}".replace(
                        "  ", " "
                    )
                )
    return "\n".join(lines) + "\n"


def quoted(text: str) -> str:
    """A word for fish, in single quotes."""
    text = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{text}'"


SCRIPTS: dict[str, Callable[[dict[str, Parser]], str]] = {
    "bash": bash,
    "zsh": lambda commands: ZSH + bash(commands),
    "fish": fish,
}
