"""Flags made from the settings of configurations, which describe themselves."""

import re
import signal
import sys
import types
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import MISSING, fields, replace
from pathlib import Path
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from absl import flags

from dlrm.command_line import exit_code_of, fail, raise_file_limit, say_error
from dlrm.files import check_all_local, check_local
from dlrm.manifest import check_lines
from dlrm.settings import Setting, defaults_of, settings_of

Config = TypeVar("Config")
# torch.distributed.launch without --use_env passes it to each process; the environment has it.
_LOCAL_RANK = re.compile(r"--local[-_]rank=\d+")


class HelpAsked(Exception):  # noqa: N818  # no error
    """The command line asks for the help instead of a run.

    Attributes:
        full: whether it also asks for absl's flags.
        text: the help, if it is not that of the whole command.
    """

    def __init__(self, full: bool, text: str | None = None):
        super().__init__()
        self.full, self.text = full, text


class UsageError(ValueError):
    """A command line that a command does not take, such as an unknown flag."""


class ConfigFlags:
    """The command line of a command: a flag for each setting of its configurations, and --help.

    The flags are not absl's global ones, so that several commands can live in one process. Dashes
    may stand for underscores in the name of a flag, and --no-flag for --noflag.

    Args:
        configs: (topic, configuration), where the topic is the heading in the help of settings that
            have none of their own. A setting of several configurations is one flag, of the first.
        topics: headings in the order of the help; others follow.
        defaults: other defaults, by name; `REQUIRED` for none.
        helps: other texts of the help, by name.
        without: settings that the command does not have.
        pass_on: whether unknown flags are positional arguments, for another program.
    """

    def __init__(
        self,
        configs: Iterable[tuple[str, type]],
        topics: Sequence[str] = (),
        defaults: Mapping[str, Any] | None = None,
        helps: Mapping[str, str] | None = None,
        without: Container[str] = (),
        pass_on: bool = False,
    ):
        self._pass_on = pass_on
        self.settings: dict[str, Setting] = {}
        self._flags = flags.FlagValues()
        self._types: dict[str, Any] = {}
        self._defaults: dict[str, Any] = {}
        for name in ("help", "h", "helpshort", "helpfull"):
            flags.DEFINE_flag(_HelpFlag(name, name == "helpfull"), flag_values=self._flags)
        for topic, config in configs:
            kinds, by_default = get_type_hints(config), defaults_of(config)
            for name, own in settings_of(config).items():
                if name in without or name in self.settings:
                    continue
                text = (helps or {}).get(name, own.help)
                own = replace(own, topic=own.topic or topic, help=text)
                self.settings[name] = own
                self._define(name, kinds[name], by_default.get(name, MISSING), own)
        self.positional = [name for name, own in self.settings.items() if own.positional]
        used = dict.fromkeys(o.topic for o in self.settings.values() if not o.positional)
        self.topics = list(dict.fromkeys([*(t for t in topics if t in used), *used]))
        for name, value in (defaults or {}).items():
            self._defaults[name] = value
            self._flags.set_default(name, None if value is MISSING else value)
        self.required = frozenset(n for n in self.settings if self._defaults[n] is MISSING)

    def named(self, **roles: bool) -> frozenset[str]:
        """Returns the flags whose settings have a role, such as `resumable=True`."""
        return frozenset(
            name
            for name, own in self.settings.items()
            if all(getattr(own, role) == value for role, value in roles.items())
        )

    def _define(self, name: str, kind: Any, default: Any, own: Setting) -> None:
        optional, kind = kind, _without_none(kind)
        self._types[name], self._defaults[name] = kind, default
        if own.positional:
            return
        default = None if default is MISSING else default
        options: dict[str, Any] = {"flag_values": self._flags, "short_name": own.short_name}
        if kind in (int, float):
            options |= {"lower_bound": own.least, "upper_bound": own.most}
        if own.repeated or own.words:
            flags.DEFINE_multi_string(name, list(default or ()) or default, own.help, **options)
        elif get_origin(kind) is tuple:
            listed = None if default is None else [str(value) for value in default]
            flags.DEFINE_list(name, listed, own.help, **options)
        elif kind is int and optional is not int and default is not None:
            parser: Any = _IntegerOrNone()
            serializer: Any = flags.ArgumentSerializer()
            flags.DEFINE(parser, name, default, own.help, self._flags, serializer)
        elif own.choices is not None:
            flags.DEFINE_enum(name, default, list(own.choices), own.help, **options)
        else:
            define: Any = {
                bool: flags.DEFINE_boolean,
                int: flags.DEFINE_integer,
                float: flags.DEFINE_float,
                str: flags.DEFINE_string,
                Path: flags.DEFINE_string,
            }[kind]
            default = str(default) if isinstance(default, Path) else default
            define(name, default, own.help, **options)
        self._flags.register_key_flag_for_module(own.topic, self._flags[name])

    def parse(self, arguments: Sequence[str]) -> "Values":
        """Returns the values of a command line, without the command's name.

        Raises:
            UsageError: the command line is wrong; the message names the flag.
            HelpAsked: a flag asks for the help.
        """
        self._flags.unparse_flags()
        for name in self._flags:
            self._flags[name].unparse()
        try:
            rest = parse_flags(self._flags, ["", *self._spelled(arguments)], self._pass_on)[1:]
            values = {n: self._value(n) for n in self._types if n not in self.positional}
            placed = self._placed(rest)
        except (ValueError, OSError) as error:
            raise UsageError(str(error)) from None
        for name in self.settings:
            if name in self.required and values.get(name, placed.get(name)) is None:
                raise UsageError(f"--{name}: expected a value, got none")
        given = {name for name in values if self._flags[name].present}
        return Values({**self._defaults, **values, **placed}, frozenset(given | placed.keys()))

    def _spelled(self, arguments: Sequence[str]) -> list[str]:
        """Returns the words of a command line with the names of flags as absl knows them."""
        spelled: list[str] = []
        listed = ""  # flag whose further values are words of their own
        for index, word in enumerate(arguments):
            if word == "--":
                return spelled + list(arguments[index:])
            if listed and not word.startswith("-"):
                spelled.append(f"{listed}={word}")
                continue
            name, *value = word.split("=", 1)
            name = self._known(name)
            followed = index + 1 < len(arguments) and not arguments[index + 1].startswith("-")
            takes_words = followed and not value and name[2:] in self.named(words=True)
            listed = name if takes_words else ""
            if not takes_words:
                spelled.append("=".join([name, *value]))
        return spelled

    def _known(self, word: str) -> str:
        plain = word[2:].replace("-", "_")
        if not word.startswith("--") or word[2:] in self._flags:
            return word
        if plain in self._flags:
            return f"--{plain}"
        return f"--no{plain[3:]}" if plain[:3] == "no_" and plain[3:] in self._flags else word

    def _placed(self, words: list[str]) -> dict[str, Any]:
        """Returns the values of positional arguments."""
        values: dict[str, Any] = {}
        rest = words
        for name in self.positional:
            many = get_origin(self._types[name]) is tuple
            own, rest = (rest, []) if many else (rest[:1], rest[1:])
            if own:
                check_all_local((name, word) for word in own)
                values[name] = self._typed(name, own if many else own[0])
        if rest or (self.required & {*self.positional}) - values.keys():
            expected = " and ".join(self.positional)
            expected = f"arguments: expected {expected}" if expected else "expected flags only"
            raise ValueError(f"{expected}, got {words or 'none'}")
        return values

    def _value(self, name: str) -> Any:
        value: Any = self._flags[name].value
        try:
            return self._typed(name, value)
        except ValueError:
            of = get_args(self._types[name])[0]
            expected = "integers" if of is int else f"{of.__name__} values"
            raise ValueError(f"--{name} {','.join(value)}: expected {expected}") from None

    def _typed(self, name: str, value: Any) -> Any:
        kind = self._types[name]
        if value is None:
            return None
        if get_origin(kind) is tuple:
            return tuple(get_args(kind)[0](item) for item in value)
        return Path(value) if kind is Path else value

    def help(self, defaults: Mapping[str, str] | None = None) -> str:
        """Returns every argument and flag with its default and meaning, by topic.

        Args:
            defaults: texts to show instead of a flag's default, by name.
        """
        text = "\n".join(self._flags.module_help(topic) for topic in self.topics)
        if self.positional:
            lines = (f"  {name}: {self.settings[name].help}" for name in self.positional)
            text = "\n".join(["\nArguments:", *lines, text])
        for name, default in (defaults or {}).items():
            told = rf"(\n +--(?:\[no\])?{name}:(?:(?!\n +--)[\s\S])*?)\(default: '[^']*'\)"
            text = re.sub(told, rf"\1(default: {default})", text)
        return text


class Subcommands:
    """The command line of a command with several tasks: the name of one, then its arguments.

    Args:
        lines: task -> its meaning, and its command line.
    """

    def __init__(self, lines: Mapping[str, tuple[str, ConfigFlags]]):
        self.lines = lines

    def parse(self, arguments: Sequence[str]) -> "Values":
        """Returns the values of the task's command line and, as `task`, its name.

        Raises:
            UsageError, HelpAsked: see `ConfigFlags.parse`.
        """
        task, *own = arguments or ["none"]
        if task not in self.lines:
            ConfigFlags(()).parse([task] if task.startswith("-") else [])
            raise UsageError(f"expected one of {', '.join(self.lines)}, got {task}")
        meaning, line = self.lines[task]
        try:
            values = line.parse(own)
        except HelpAsked as asked:
            raise HelpAsked(asked.full, f"{task}: {meaning}\n{line.help()}") from None
        return Values({**values, "task": task}, values.given)

    def help(self) -> str:
        """Returns the tasks with their meanings."""
        tasks = (f"  {task}: {meaning}" for task, (meaning, _) in self.lines.items())
        return "\n".join(["\nTasks, of which --help shows the flags:", *tasks])


def help_of_absl() -> str:
    """Returns the flags that absl adds to every command, with their meaning."""
    return "absl.flags:\n" + flags.FlagValues().get_help(prefix="  ")


class _HelpFlag(flags.BooleanFlag):
    """Ends parsing, whatever else the command line has, right or wrong."""

    def __init__(self, name: str, full: bool):
        super().__init__(name, False, "show the flags", "?" if name == "help" else None)
        self._full = full

    def parse(self, argument: Any) -> None:
        if self._parse(argument):
            raise HelpAsked(self._full)


class _IntegerOrNone(flags.IntegerParser):
    def parse(self, argument: Any) -> Any:
        return None if argument in (None, "None", "none") else super().parse(argument)


def run_command(
    line: "ConfigFlags | Subcommands",
    act: Callable[["Values"], int | None],
    doc: str | None,
    arguments: Sequence[str] | None = None,
    *,
    usage: int | None = None,
    code: int = 1,
    **others: Any,
) -> int:
    """Parses a command line, runs the command and returns the exit code; see `exit_code_of`.

    Args:
        line: the flags of the command.
        act: the command.
        doc: text at the start of the help.
        arguments: words after the command's name; by default those of this process.
        usage: exit code after a `UsageError`; by default that of other errors.
        code: exit code after other errors.
        others: arguments of `exit_code_of`.
    """

    def run() -> int | None:
        try:
            return act(line.parse(sys.argv[1:] if arguments is None else arguments))
        except HelpAsked as asked:
            _show_help(f"{doc}\n{asked.text or line.help()}", asked)
            return 0
        except UsageError as error:
            return say_error(error, code if usage is None else usage)

    return exit_code_of(run, code=code, **others)


def parsed_or_help(
    arguments: Sequence[str],
    parse: Callable[[list[str]], "Values"],
    help_text: Callable[[], str],
) -> "Values | None":
    """Returns the flags of a training command; None after showing its help.

    An error of the flags ends the process.

    Args:
        arguments: arguments after the command's name.
        parse: parses them.
        help_text: returns the help.
    """
    try:
        return parse([word for word in arguments if not _LOCAL_RANK.fullmatch(word)])
    except HelpAsked as asked:
        _show_help(help_text(), asked)
        return None
    except ValueError as error:
        fail(error)


def _show_help(text: str, asked: HelpAsked) -> None:
    """Prints a help; the process ends if the reader of a pipe, such as `head`, closes it."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    hint = "Try --helpfull to get a list of all flags."
    print(f"{text}\n\n{help_of_absl() if asked.full else hint}")


class Values(dict[str, Any]):
    """Flags with their values.

    Args:
        values: the value of every flag.
        given: the flags that the user gave, also with their default values.
    """

    def __init__(self, values: Mapping[str, Any], given: frozenset[str]):
        super().__init__(values)
        self.given = given

    def filled(self, others: Mapping[str, Any]) -> "Values":
        """Returns the values with those of `others` for flags that the user did not give."""
        taken = {name: value for name, value in others.items() if name not in self.given}
        assert taken.keys() <= self.keys(), f"no such flags: {taken.keys() - self.keys()}"
        return Values({**self, **taken}, self.given)

    def config(self, cls: type[Config], **others: Any) -> Config:
        """Makes a configuration from the flags that have its fields' names, and `others`.

        Raises:
            ValueError: the configuration refuses a value.
        """
        own = {f.name: self[f.name] for f in fields(cls) if f.name in self}  # type: ignore[arg-type]
        return cls(**{**own, **others})


def _without_none(kind: Any) -> Any:
    """Returns `int` for `int | None`."""
    if get_origin(kind) in (Union, types.UnionType):
        (kind,) = (one for one in get_args(kind) if one is not type(None))
    return kind


def parse_flags(
    values: flags.FlagValues, arguments: list[str], known_only: bool = False
) -> list[str]:
    """Parses flags, those of `--flagfile` too, at the start of a command; returns the rest.

    Raises:
        ValueError: an unknown flag, a value that a flag cannot have, a URI where a path is
            expected, or a file without flags.
    """
    raise_file_limit()
    _check_flag_files(arguments)
    try:
        rest = values(arguments, known_only)
    except flags.Error as error:
        if isinstance(error.__context__, FileNotFoundError):
            check_local(error.__context__.filename, "--flagfile")
        raise ValueError(str(error).removeprefix("ERROR:: ")) from None
    except UnicodeDecodeError as error:
        raise ValueError(f"--flagfile: expected text in UTF-8, got byte {error.start}") from None
    except RecursionError:
        raise ValueError("--flagfile: expected files that do not name each other") from None
    given = (values[name] for name in values if values[name].present)
    check_all_local((f"--{flag.name}", flag.value) for flag in given)
    return rest


def _check_flag_files(words: list[str], outer: tuple[Path, ...] = ()) -> None:
    """Compares flag files, and those that they name, with their checksums, if they have any."""
    for word, following in zip(words, [*words[1:], ""], strict=True):
        if word == "--":
            return
        if found := re.fullmatch(r"--?flagfile(?:=(.*))?", word):
            path = Path(following if found[1] is None else found[1]).expanduser()
            if path.is_file() and path not in outer:
                check_lines(path)
                lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
                _check_flag_files([line.strip() for line in lines], (*outer, path))
