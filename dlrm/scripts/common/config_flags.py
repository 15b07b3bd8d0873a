"""Flags that are the fields of configurations: name, default and type are written once, there."""

import re
import signal
import types
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, fields
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from absl import flags

Config = TypeVar("Config")


class ConfigFlags:
    """The command line of a command: fields of configurations, flags of its own, and --help.

    The flags are not absl's global ones, so that several commands can live in one process.

    Args:
        own: topic -> flags that are no field: name -> (type, default, help), the type as in a
            field. The help shows topic after topic.
        configs: (topic, configuration) -> the name and help of each field that is a flag.
    """

    def __init__(
        self,
        own: Mapping[str, Mapping[str, tuple[Any, Any, str]]],
        configs: Mapping[tuple[str, type], Mapping[str, str]],
    ):
        self._flags = flags.FlagValues()
        self._types: dict[str, Any] = {}
        self._define(None, "help", bool, False, "Show the flags")
        for topic, definitions in own.items():
            for name, definition in definitions.items():
                self._define(topic, name, *definition)
        for (topic, config), helps in configs.items():
            defaults = {field.name: _default(field) for field in fields(config)}
            kinds = get_type_hints(config)
            for name, text in helps.items():
                self._define(topic, name, kinds[name], defaults[name], text)

    def _define(self, topic: str | None, name: str, kind: Any, default: Any, text: str) -> None:
        kind = _without_none(kind)
        self._types[name] = kind
        if get_origin(kind) is tuple:
            listed = None if default is None else [str(value) for value in default]
            flags.DEFINE_list(name, listed, text, flag_values=self._flags)
        else:
            define: Any = {
                bool: flags.DEFINE_boolean,
                int: flags.DEFINE_integer,
                float: flags.DEFINE_float,
                str: flags.DEFINE_string,
            }[kind]
            define(name, default, text, flag_values=self._flags)
        if topic:
            self._flags.register_key_flag_for_module(topic, self._flags[name])

    def parse(self, arguments: Sequence[str]) -> "Values":
        """Returns the values of a command line, without the command's name.

        Raises:
            ValueError: an unknown flag, a value of another type, or an argument that is no flag.
        """
        self._flags.unparse_flags()
        for name in self._flags:
            self._flags[name].unparse()
        try:
            rest = self._flags(["", *arguments])[1:]
        except flags.Error as error:
            raise ValueError(str(error)) from error
        if rest:
            raise ValueError(f"expected flags only, got {rest}")
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
            raise ValueError(f"--{name} {','.join(value)}: expected {of.__name__} values") from None

    def help(self, defaults: Mapping[str, str] | None = None) -> str:
        """Returns every flag but --help with its default and meaning.

        Args:
            defaults: what is said instead of the default that is defined.
        """
        topics = self._flags.key_flags_by_module_dict()
        text = "\n".join(self._flags.module_help(topic) for topic in topics)
        for name, default in (defaults or {}).items():
            told = rf"(\n +--(?:\[no\])?{name}:(?:(?!\n +--)[\s\S])*?)\(default: '[^']*'\)"
            text = re.sub(told, rf"\1(default: {default})", text)
        return text


VERIFY_DATA_HELP = (
    "When to compare the dataset's files with its checksums: before they are first read, in every "
    "run, or never"
)


def one_of(choices: Iterable[str], text: str) -> str:
    """Returns the help of a flag with these values only, as absl writes that of its own."""
    return f"<{'|'.join(choices)}>: {text}"


def show(text: str) -> None:
    """Prints a help; where its reader has seen enough, as `head`, the process ends."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    print(text)


class Values(dict[str, Any]):
    """Flags with their values.

    Args:
        values: of every flag.
        given: the flags that the user gave, be it with their defaults.
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
            ValueError: what the configuration refuses.
        """
        own = {f.name: self[f.name] for f in fields(cls) if f.name in self}  # type: ignore[arg-type]
        return cls(**{**own, **others})


def _default(field: Field) -> Any:
    return None if field.default is MISSING else field.default


def _without_none(kind: Any) -> Any:
    """`int` of `int | None`."""
    if get_origin(kind) in (Union, types.UnionType):
        (kind,) = (one for one in get_args(kind) if one is not type(None))
    return kind
