"""`pageferry completion SHELL`: prints a script that completes commands and their options."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import re

BASH = """_pageferry() {{
    local words="{names} --help --version"
    if [ "$COMP_CWORD" -gt 1 ]; then
        case "${{COMP_WORDS[1]}}" in
{cases}
        esac
    fi
    COMPREPLY=($(compgen -W "$words" -- "${{COMP_WORDS[COMP_CWORD]}}"))
}}
complete -o default -F _pageferry pageferry
"""
ZSH = "autoload -U +X bashcompinit && bashcompinit\n"


def main(argv: list[str]) -> int:
    make = argparse.ArgumentParser(
        prog="pageferry completion",
        description="Prints a completion script. bash: source <(pageferry completion bash); "
        "fish: pageferry completion fish > ~/.config/fish/completions/pageferry.fish",
    )
    make.add_argument("shell", choices=("bash", "zsh", "fish"))
    shell = make.parse_args(argv).shell
    options_by_command = {name: options(name) for name in _commands()}
    print({"bash": bash, "zsh": lambda each: ZSH + bash(each), "fish": fish}[shell](options_by_command), end="")
    return 0


def _commands() -> dict[str, tuple[str, str]]:
    """Module and summary of each command. Imported late: the command line imports this module by name."""
    from app.cli import COMMANDS

    return {name: (command.module, command.summary) for name, command in COMMANDS.items()}


def options(name: str) -> list[str]:
    """The long options that the command's own help names."""
    if name == "completion":
        return ["bash", "zsh", "fish"]
    module, _ = _commands()[name]
    help_text = io.StringIO()
    with contextlib.redirect_stdout(help_text), contextlib.suppress(SystemExit):
        importlib.import_module(module).main(["--help"])
    return sorted(set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*", help_text.getvalue())))


def bash(options_by_command: dict[str, list[str]]) -> str:
    cases = "\n".join(f'            {name}) words="{" ".join(words)}" ;;' for name, words in options_by_command.items())
    return BASH.format(names=" ".join(options_by_command), cases=cases)


def fish(options_by_command: dict[str, list[str]]) -> str:
    lines = []
    for name, (_, summary) in _commands().items():
        quoted = summary.replace("'", "\\'")
        lines.append(f"complete -c pageferry -n __fish_use_subcommand -a {name} -d '{quoted}'")
        for word in options_by_command[name]:
            kind = f"-l {word.removeprefix('--')}" if word.startswith("--") else f"-a {word}"
            lines.append(f"complete -c pageferry -n '__fish_seen_subcommand_from {name}' {kind}")
    return "\n".join(lines) + "\n"
