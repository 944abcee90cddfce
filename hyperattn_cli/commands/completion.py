"""`hyperattn completion`: print a completion script for a shell.

This module imports only `hyperattn_cli`, so that it starts without torch.
"""

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
#: Lines that let zsh run a script for bash.
ZSH = "#compdef hyperattn\nautoload -U +X bashcompinit && bashcompinit\n"


def run(args: argparse.Namespace) -> None:
    """Print the script."""
    (commands,) = (a for a in build_parser()._actions if isinstance(a, argparse._SubParsersAction))
    script = SCRIPTS[args.shell](dict(commands.choices))
    if args.json:
        print(json.dumps({"shell": args.shell, "script": script}, indent=2))
    else:
        print(script, end="")


def list_values(action: argparse.Action) -> list[str]:
    """Return the values of an option or argument, or [] if they cannot be listed."""
    if action.choices:
        return [str(word) for word in action.choices]
    return patch_names() if any(option in NAMES for option in action.option_strings) else []


def make_bash_script(commands: dict[str, Parser]) -> str:
    """Return the script for bash; it completes file names if no values are known."""
    values = []
    options = []
    for name, parser in commands.items():
        for action in filter(list_values, parser._actions):
            # Positional arguments follow the command itself.
            places = [f'"{name} {option}"' for option in action.option_strings] or [
                f'"{name} {name}"'
            ]
            values.append(f'    {"|".join(places)}) words="{" ".join(list_values(action))}";;')
        options.append(f'           {name}) words="{" ".join(parser._option_string_actions)}";;')
    return BASH.format(
        commands=" ".join(commands), values="\n".join(values), options="\n".join(options)
    )


def make_fish_script(commands: dict[str, Parser]) -> str:
    """Return the script for fish, with the help of every option."""
    lines = []
    for name in commands:
        about = (COMMANDS[name].__doc__ or "").partition("\n")[0]
        lines.append(
            f"complete -c hyperattn -n __fish_use_subcommand -f -a {name} -d {quote_for_fish(about)}"
        )
    for name, parser in commands.items():
        # These lines apply only after the sub-command was typed.
        inside = f"complete -c hyperattn -n '__fish_seen_subcommand_from {name}'"
        for action in parser._actions:
            longs = [
                f"-l {option[2:]}" for option in action.option_strings if option.startswith("--")
            ]
            values = quote_for_fish(" ".join(list_values(action)))
            words = f" -x -a {values}" if list_values(action) else ""
            # -r: the option needs a value. Fish then offers file names.
            needs = " -r" if not words and longs and action.nargs != 0 else ""
            if longs or words:
                about = quote_for_fish(action.help or "")
                line = f"{inside} {' '.join(longs)}{words}{needs} -d {about}"
                lines.append(line.replace("  ", " "))
    return "\n".join(lines) + "\n"


def quote_for_fish(text: str) -> str:
    """Return text in single quotes, as fish reads them."""
    text = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{text}'"


SCRIPTS: dict[str, Callable[[dict[str, Parser]], str]] = {
    "bash": make_bash_script,
    "zsh": lambda commands: ZSH + make_bash_script(commands),
    "fish": make_fish_script,
}
