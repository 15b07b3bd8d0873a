"""Flags made from the settings of configurations, which describe themselves."""

import re
import signal
import types
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from absl import flags

from dlrm.command_line import fail, raise_file_limit
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
    """

    def __init__(self, full: bool):
        super().__init__()
        self.full = full


class UsageError(ValueError):
    """An unknown flag, a value that a flag cannot have, or an argument that is not a flag."""


class ConfigFlags:
    """The command line of a command: a flag for each setting of its configurations, and --help.

    The flags are not absl's global ones, so that several commands can live in one process.

    Args:
        configs: (topic, configuration), where the topic is the heading in the help of settings that
            have none of their own. A setting of several configurations is one flag, of the first.
        topics: headings in the order of the help; others follow.
        defaults: other defaults, by name.
        helps: other texts of the help, by name.
        without: settings that the command does not have.
    """

    def __init__(
        self,
        configs: Iterable[tuple[str, type]],
        topics: Sequence[str] = (),
        defaults: Mapping[str, Any] | None = None,
        helps: Mapping[str, str] | None = None,
        without: Container[str] = (),
    ):
        self.settings: dict[str, Setting] = {}
        self._flags = flags.FlagValues()
        self._types: dict[str, Any] = {}
        for name, full in (("help", False), ("helpshort", False), ("helpfull", True)):
            flags.DEFINE_flag(_HelpFlag(name, full), flag_values=self._flags)
        for topic, config in configs:
            kinds, by_default = get_type_hints(config), defaults_of(config)
            for name, own in settings_of(config).items():
                if name in without or name in self.settings:
                    continue
                text = (helps or {}).get(name, own.help)
                own = replace(own, topic=own.topic or topic, help=text)
                self.settings[name] = own
                self._define(name, kinds[name], by_default[name], own)
        used = dict.fromkeys(own.topic for own in self.settings.values())
        self.topics = list(dict.fromkeys([*(t for t in topics if t in used), *used]))
        for name, value in (defaults or {}).items():
            self._flags.set_default(name, value)

    def named(self, **roles: bool) -> frozenset[str]:
        """Returns the flags whose settings have a role, such as `resumable=True`."""
        return frozenset(
            name
            for name, own in self.settings.items()
            if all(getattr(own, role) == value for role, value in roles.items())
        )

    def _define(self, name: str, kind: Any, default: Any, own: Setting) -> None:
        optional, kind = kind, _without_none(kind)
        self._types[name] = kind
        options: dict[str, Any] = {"flag_values": self._flags, "short_name": own.short_name}
        if kind in (int, float):
            options |= {"lower_bound": own.least, "upper_bound": own.most}
        if get_origin(kind) is tuple:
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
            }[kind]
            define(name, default, own.help, **options)
        self._flags.register_key_flag_for_module(own.topic, self._flags[name])

    def parse(self, arguments: Sequence[str]) -> "Values":
        """Returns the values of a command line, without the command's name.

        Raises:
            UsageError: a flag is unknown, a value is of another type, or an argument is not a flag.
            ValueError: an item of a list is of another type.
            HelpAsked: a flag asks for the help.
        """
        self._flags.unparse_flags()
        for name in self._flags:
            self._flags[name].unparse()
        try:
            rest = parse_flags(self._flags, ["", *arguments])[1:]
        except ValueError as error:
            raise UsageError(str(error)) from None
        if rest:
            raise UsageError(f"expected flags only, got {rest}")
        values = {name: self._value(name) for name in self._types}
        return Values(values, frozenset(n for n in self._types if self._flags[n].present))

    def _value(self, name: str) -> Any:
        value, kind = self._flags[name].value, self._types[name]
        if get_origin(kind) is not tuple or value is None:
            return value
        of = get_args(kind)[0]
        try:
            return tuple(of(item) for item in value)
        except ValueError:
            expected = "integers" if of is int else f"{of.__name__} values"
            raise ValueError(f"--{name} {','.join(value)}: expected {expected}") from None

    def help(self, defaults: Mapping[str, str] | None = None) -> str:
        """Returns every flag but those of the help with its default and meaning, by topic.

        Args:
            defaults: texts to show instead of a flag's default, by name.
        """
        text = "\n".join(self._flags.module_help(topic) for topic in self.topics)
        for name, default in (defaults or {}).items():
            told = rf"(\n +--(?:\[no\])?{name}:(?:(?!\n +--)[\s\S])*?)\(default: '[^']*'\)"
            text = re.sub(told, rf"\1(default: {default})", text)
        return text


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
        hint = "Try --helpfull to get a list of all flags."
        show(f"{help_text()}\n\n{help_of_absl() if asked.full else hint}")
        return None
    except ValueError as error:
        fail(error)


def show(text: str) -> None:
    """Prints a help; the process ends if the reader of a pipe, such as `head`, closes it."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    print(text)


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


def parse_flags(values: flags.FlagValues, arguments: list[str]) -> list[str]:
    """Parses flags, those of `--flagfile` too, at the start of a command; returns the rest.

    Raises:
        ValueError: an unknown flag, a value that a flag cannot have, a URI where a path is
            expected, or a file without flags.
    """
    raise_file_limit()
    _check_flag_files(arguments)
    try:
        rest = values(arguments)
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
    check_all_local(("", argument) for argument in rest[1:])
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
