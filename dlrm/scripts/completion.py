"""Prints a script that completes the commands of `dlrm` and their flags in a shell.

    source <(dlrm completion bash)
    source <(dlrm completion zsh)
    dlrm completion fish | source

The script asks `dlrm COMMAND --complete` for the flags, so that it fits every version.
"""

import sys
from dataclasses import dataclass

from dlrm.command_line import show
from dlrm.flags import ConfigFlags, UsageError, Values, run_command
from dlrm.settings import REQUIRED, setting

# bash splits words at "=", so that it completes only what follows one.
_BASH = r"""_dlrm() {
  local line="${COMP_LINE:0:COMP_POINT}" command="" cur found IFS=$' \t\n'
  cur="${line##* }"
  (( COMP_CWORD > 1 )) && command="${COMP_WORDS[1]}"
  found="$("${COMP_WORDS[0]}" $command --complete 2>/dev/null)"
  [[ "$cur" == *=* ]] || found="$(sed 's/=.*/=/' <<<"$found" | uniq)"
  COMPREPLY=($(compgen -W "$found" -- "$cur"))
  [[ "${COMPREPLY[0]}" == *= ]] && compopt -o nospace
  [[ "$cur" == *=* ]] && COMPREPLY=("${COMPREPLY[@]#*=}")
}
complete -o default -F _dlrm dlrm
"""
_ZSH = r"""#compdef dlrm
_dlrm() {
  local -a found
  if (( CURRENT > 2 )); then
    found=(${(f)"$($words[1] $words[2] --complete 2>/dev/null)"})
  else
    found=(${(f)"$($words[1] --complete 2>/dev/null)"})
  fi
  [[ $PREFIX == *=* ]] || found=(${(u)found/=*/=})
  compadd -- ${found:#*=}
  compadd -S '' -- ${(M)found:#*=}
  _files
}
compdef _dlrm dlrm
"""
_FISH = """function __dlrm_words
  set -l words (commandline -opc)
  $words[1] $words[2] --complete 2>/dev/null
end
complete -c dlrm -a '(__dlrm_words)'
"""
_SCRIPTS = {"bash": _BASH, "zsh": _ZSH, "fish": _FISH}


@dataclass(frozen=True)
class CompletionConfig:
    """The shell; field names are those of the flags."""

    shell: str = setting(REQUIRED, "bash, zsh or fish", positional=True)


def main(arguments: list[str] | None = None) -> int:
    """Runs a command line; returns the exit code."""
    line = ConfigFlags([("Flags", CompletionConfig)])
    return run_command(line, _run, __doc__, arguments, usage=2)


def _run(values: Values) -> None:
    shell = values["shell"]
    if shell not in _SCRIPTS:
        raise UsageError(f"{shell}: expected one of {', '.join(_SCRIPTS)}")
    show(_SCRIPTS[shell].rstrip())


if __name__ == "__main__":
    sys.exit(main())
