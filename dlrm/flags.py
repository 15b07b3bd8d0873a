"""Flags made from the settings of configurations, which describe themselves."""

import os
import re
import sys
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from absl import flags

from dlrm.command_line import exit_code_of, raise_file_limit, say_error, show, text_of
from dlrm.documents import brief, line_of_key, read_yaml
from dlrm.files import check_all_local
from dlrm.remote.config import CacheConfig
from dlrm.remote.uri import check_path, is_uri
from dlrm.settings import REQUIRED, Setting, defaults_of, nearest_names, settings_of, uris_of
from dlrm.version import version_line

Config = TypeVar("Config")
_ALL_COMMANDS = """All commands:
  --config: a YAML file of flags, by name; flags of the command line take precedence
  --version: show the versions of dlrm, torch and Python, and the native parts

absl.flags:
"""
_TEXTS: Any = flags.ArgumentParser()
_AS_TEXT: Any = flags.ArgumentSerializer()
# torch.distributed.launch without --use_env passes it to each process; the environment has it.


class UsageError(ValueError):
    """A command line that a command does not take, such as an unknown flag."""


class HelpAsked(Exception):  # noqa: N818  # no error
    """The command line asks for a text, the help or the versions, instead of a run.

    Attributes:
        flag: the flag that asks.
        full: whether it also asks for the flags that every command has.
    """

    def __init__(self, flag: str):
        super().__init__()
        self.flag, self.full = flag, flag == "helpfull"

    def text(self, help_text: Callable[[], str]) -> str:
        """Returns the text, given the command's help."""
        if self.flag == "version":
            return version_line()
        hint = "Try --helpfull to get a list of all flags."
        every = _ALL_COMMANDS + flags.FlagValues().get_help(prefix="  ")
        return f"{help_text()}\n\n{every if self.full else hint}"


class Values(dict[str, Any]):
    """Flags with their values.

    Args:
        given: the flags that the user gave, also with their default values.
    """

    def __init__(self, values: Mapping[str, Any], given: frozenset[str]):
        super().__init__(values)
        self.given = given

    def replaced(self, others: Mapping[str, Any]) -> "Values":
        """Returns the values with those of `others` in their place."""
        return Values({**self, **others}, self.given)

    def without(self, names: Collection[str]) -> "Values":
        """Returns the values without some flags."""
        kept = {name: value for name, value in self.items() if name not in names}
        return Values(kept, self.given - {*names})

    def filled(self, others: Mapping[str, Any]) -> "Values":
        """Returns the values with those of `others` for flags that the user did not give."""
        taken = {name: value for name, value in others.items() if name not in self.given}
        assert taken.keys() <= self.keys(), f"no such flags: {taken.keys() - self.keys()}"
        return self.replaced(taken)

    def config(self, cls: type[Config], **others: Any) -> Config:
        """Makes a configuration from the flags that have its fields' names, and `others`.

        Raises:
            ValueError: the configuration refuses a value.
        """
        own = {f.name: self[f.name] for f in fields(cls) if f.name in self}  # type: ignore[arg-type]
        return cls(**{**own, **others})


class ConfigFlags:
    """The command line of a command: a flag for each setting of its configurations.

    All command lines also have --help, --version and --config, a YAML file of flags. Flags of the
    command line take precedence. Dashes may stand for underscores in the name of a flag, and
    --no-flag for --noflag. The flags are not absl's global ones, so that several commands can live
    in one process.

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
        self._flags = flags.FlagValues()
        self._types: dict[str, Any] = {}
        self._defaults: dict[str, Any] = {}
        self.settings: dict[str, Setting] = {}
        for name in ("help", "h", "helpshort", "helpfull", "version"):
            flags.DEFINE_flag(_AskFlag(name), self._flags)
        flags.DEFINE_string("config", None, "YAML file of flags", self._flags)
        configs = [*configs]
        if uris_of(*(config for _, config in configs)):
            configs.append(("URIs", CacheConfig))
        for topic, config in configs:
            kinds, own_defaults = get_type_hints(config), defaults_of(config)
            for name, own in settings_of(config).items():
                if name in without or name in self.settings:
                    continue
                text = (helps or {}).get(name, own.help) + ("; may be a URI" if own.uri else "")
                default = (defaults or {}).get(name, own_defaults.get(name, REQUIRED))
                self.settings[name] = replace(own, topic=own.topic or topic, help=text)
                self._define(name, kinds[name], default, self.settings[name])
        self.positional = [name for name, own in self.settings.items() if own.positional]
        used = dict.fromkeys(o.topic for o in self.settings.values() if not o.positional)
        self.topics = list(dict.fromkeys([*(t for t in topics if t in used), *used]))
        self.required = frozenset(n for n, value in self._defaults.items() if value is REQUIRED)
        self.resumable = frozenset(n for n, own in self.settings.items() if own.resumable)
        self.uris = {name: own.uri for name, own in self.settings.items() if own.uri}

    def _define(self, name: str, kind: Any, default: Any, own: Setting) -> None:
        may_be_none = type(None) in get_args(kind)
        kind = get_args(kind)[0] if may_be_none else kind
        self._types[name], self._defaults[name] = kind, default
        if own.positional:
            return
        default = None if default is REQUIRED else default
        options: dict[str, Any] = {"flag_values": self._flags, "short_name": own.short_name}
        if own.repeated:
            flags.DEFINE_multi_string(name, list(default or ()) or default, own.help, **options)
        elif get_origin(kind) is tuple:
            listed = None if default is None else [str(value) for value in default]
            flags.DEFINE_list(name, listed, own.help, **options)
        elif own.choices is not None:
            flags.DEFINE_enum(name, default, list(own.choices), own.help, **options)
        elif kind is bool:
            flags.DEFINE_boolean(name, default, own.help, **options)
        else:
            integers = _IntegerOrNone if may_be_none else flags.IntegerParser
            numbers: dict[Any, Any] = {int: integers, float: flags.FloatParser}
            parser = numbers[kind](own.least, own.most) if kind in numbers else _TEXTS
            default = default if default is None or kind in numbers else str(default)
            flags.DEFINE(parser, name, default, own.help, serializer=_AS_TEXT, **options)
        self._flags.register_key_flag_for_module(own.topic, self._flags[name])

    def tell_defaults(self, texts: Mapping[str, str]) -> None:
        """Gives the help texts to show instead of the defaults of flags, by name."""
        for name, text in texts.items():
            if self._flags[name].default_as_str:
                self._flags[name].default_as_str = text

    def help(self) -> str:
        """Returns every argument and flag with its default and meaning, by topic."""
        places = [f"  {name}: {self.settings[name].help}" for name in self.positional]
        topics = map(self._flags.module_help, self.topics)
        return "\n".join([*(["\nArguments:", *places] if places else []), *topics])

    def parse(self, arguments: Sequence[str]) -> Values:
        """Returns the values of a command line, without the command's name.

        Raises:
            UsageError: the command line is wrong; the message names the flag.
            HelpAsked: a flag asks for the help.
        """
        raise_file_limit()
        try:
            placed = self._placed(self._parsed(self._spelled(arguments)))
            if path := self._flags["config"].value:
                check_all_local([("--config", path)])
                if not os.path.exists(path):
                    raise FileNotFoundError(f"--config {path}: no such file")
                self._read(path)
            named = {name: self._flags[name] for name in self._types if name not in self.positional}
            given = {name: flag.value for name, flag in named.items() if flag.present} | placed
            for name, value in given.items():
                self._check_paths(name, value)
            values = {name: self._typed(name, flag.value) for name, flag in named.items()}
            values |= {name: self._typed(name, value) for name, value in placed.items()}
        except UnicodeDecodeError as error:  # absl reads files of flags as text
            raise UsageError(
                f"--flagfile: expected text in UTF-8, got byte {error.start}"
            ) from None
        except (flags.Error, ValueError, OSError) as error:
            raise UsageError(str(error).removeprefix("ERROR:: ")) from None
        for name in self.settings:
            if name in self.required and values.get(name) is None:
                raise UsageError(f"{self._shown(name)}: expected a value, got none")
        return Values({**self._defaults, **values}, frozenset(given))

    def _spelled(self, arguments: Sequence[str]) -> list[str]:
        """Returns flags as absl spells them: --no-a-b as --noa_b, and a flag for each item."""
        spelled: list[str] = []
        listed = ""  # flag whose further items are words of their own
        for index, word in enumerate(arguments):
            if word == "--":
                return spelled + list(arguments[index:])
            if listed and not word.startswith("-"):
                spelled.append(f"{listed}={word}")
                continue
            name, equals, value = word.partition("=")
            name = self._known(name)
            own = self.settings.get(name[2:])
            is_followed = index + 1 < len(arguments) and not arguments[index + 1].startswith("-")
            listed = name if own and own.repeated and is_followed and not equals else ""
            if not listed:
                spelled.append(f"{name}{equals}{value}")
        return spelled

    def _known(self, word: str) -> str:
        """Returns a flag by the name that it was defined with, if there is one."""
        name = word[2:].replace("-", "_")
        switch = re.sub("^no_?", "", name)
        if not word.startswith("--"):
            return word
        if name in self._flags:
            return f"--{name}"
        return f"--no{switch}" if switch in self._flags else word

    def _parsed(self, words: list[str]) -> list[str]:
        """Sets the flags to those of a command line, and returns its other words."""
        self._flags.unparse_flags()
        for name in self._flags:
            self._flags[name].unparse()
        try:
            return self._flags(["", *words], self._pass_on)[1:]
        except flags.UnrecognizedFlagError as error:
            raise ValueError(self._unknown(error.flagname)) from None

    def _unknown(self, name: str) -> str:
        near = nearest_names(name, self._flags)
        asked = f". Did you mean: {', '.join(near)} ?" if near else ""  # in absl's words
        return f"Unknown command line flag {brief(name)}{asked}"

    def _placed(self, words: list[str]) -> dict[str, Any]:
        """Returns the positional arguments."""
        placed: dict[str, Any] = {}
        rest = words
        for name in self.positional:
            if rest and get_origin(self._types[name]) is tuple:
                placed[name], rest = rest, []
            elif rest:
                placed[name], rest = rest[0], rest[1:]
        if rest:
            expected = " and ".join(self.positional) or "flags"
            raise ValueError(f"expected {expected} only, got {words}")
        return placed

    def _read(self, path: str) -> None:
        """Sets the flags of a YAML file that the command line does not have."""
        given = {name for name in self._flags if self._flags[name].present}
        for key, value in read_yaml(path).items():
            try:
                if key not in self.settings or key in self.positional:
                    raise ValueError(self._unknown(str(key)))
                is_switch = isinstance(value, bool) and self._types[key] is not bool
                is_several = isinstance(value, list) and get_origin(self._types[key]) is not tuple
                if is_switch or is_several or isinstance(value, dict):
                    raise ValueError(f"--{key} {brief(value)}: expected a value; a text has quotes")
                if key not in given and value is not None:
                    is_list = isinstance(value, list)
                    self._flags[key].parse([*map(str, value)] if is_list else str(value))
                    self.settings[key].check(key, self._typed(key, self._flags[key].value))
            except (flags.Error, ValueError) as error:
                line = line_of_key(path, str(key))
                raise ValueError(f"{path}: {f'line {line}: ' if line else ''}{error}") from None

    def _check_paths(self, name: str, value: Any) -> None:
        """Raises ValueError for a URI in a flag that takes none, or a wrong one elsewhere."""
        if name not in self.uris:
            check_all_local([(self._shown(name), value)])
            return
        for item in _items(value):
            check_path(item, self._shown(name))

    def _typed(self, name: str, value: Any) -> Any:
        kind = self._types[name]
        if get_origin(kind) is tuple and value is not None:
            of = get_args(kind)[0]
            try:
                return tuple(of(item) for item in value)
            except ValueError:
                message = f"{self._shown(name)} {text_of(value)}: expected {of.__name__} values"
                raise ValueError(message) from None
        if kind == int | str:
            return int(value) if re.fullmatch(r"[+-]?\d+", value) else value
        return Path(value) if kind is Path and value is not None else value

    def _shown(self, name: str) -> str:
        return name if name in self.positional else f"--{name}"


class _AskFlag(flags.BooleanFlag):
    """Ends parsing, whatever else the command line has, right or wrong."""

    def __init__(self, name: str):
        super().__init__(name, False, "show a text", "?" if name == "help" else None)

    def parse(self, argument: Any) -> None:
        if self._parse(argument):
            raise HelpAsked(self.name)


class _IntegerOrNone(flags.IntegerParser):
    def parse(self, argument: Any) -> Any:
        return None if argument in ("None", "none") else super().parse(argument)


def run_command(
    line: ConfigFlags,
    act: Callable[[Values], int | None],
    doc: str | None,
    arguments: Sequence[str] | None = None,
    *,
    usage: int | None = None,
    code: int = 1,
    at_store: Callable[[Values], Collection[str]] = lambda values: (),
    **others: Any,
) -> int:
    """Parses a command line, runs the command and returns the exit code; see `exit_code_of`.

    Args:
        doc: text at the start of the help.
        arguments: words after the command's name; by default those of this process.
        usage: exit code after a `UsageError`; by default that of other errors.
        code: exit code after other errors.
        at_store: returns the flags whose URIs the command reads and writes itself, which then gets
            the flags of `CacheConfig` as well.
        others: arguments of `exit_code_of`.
    """

    def run() -> int | None:
        try:
            values = line.parse(sys.argv[1:] if arguments is None else arguments)
            roles, own = line.uris, values.without(settings_of(CacheConfig))
            if left := at_store(values):
                roles, own = {name: roles[name] for name in roles.keys() - left}, values
            if not any(is_uri(item) for name in roles for item in _items(values[name])):
                return act(own)
            from dlrm.remote.localize import run_locally

            return run_locally(values, roles, lambda local: act(own.replaced(local)))
        except HelpAsked as asked:
            show(asked.text(lambda: f"{doc}\n{line.help()}"))
            return 0
        except UsageError as error:
            return say_error(error, usage or code)

    return exit_code_of(run, code=code, **others)


def _items(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list | tuple) else [value]
