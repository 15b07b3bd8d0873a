"""Flags made from fields of configurations, which define their names, defaults and types."""

import re
import signal
import types
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from absl import flags

from dlrm.scripts.common.command import parse_flags

Config = TypeVar("Config")


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


@dataclass(frozen=True)
class Help:
    """The help of a flag whose value is checked where it is parsed.

    Attributes:
        text: the help; absl adds the expected values.
        choices: the only values that the flag takes.
        least, most: bounds of a number, both included.
        short_name: another name.
    """

    text: str
    choices: Iterable[str] | None = None
    least: float | None = None
    most: float | None = None
    short_name: str | None = None

    def options(self) -> dict[str, Any]:
        """Returns the arguments of a flag's definition besides name, default and text."""
        given = {
            "enum_values": None if self.choices is None else list(self.choices),
            "lower_bound": self.least,
            "upper_bound": self.most,
            "short_name": self.short_name,
        }
        return {name: value for name, value in given.items() if value is not None}


Definitions = dict[str, tuple[Any, Any, str | Help]]  # name -> (type, default, help)


class ConfigFlags:
    """The command line of a command: fields of configurations, flags of its own, and --help.

    The flags are not absl's global ones, so that several commands can live in one process.

    Args:
        own: topic -> flags that are not fields, with types as in a field. The help shows these
            topics first, in this order; a topic may have fields only.
        configs: (topic, configuration) -> the name and help of each field that is a flag.
        defaults: other defaults, by name.
    """

    def __init__(
        self,
        own: Mapping[str, Definitions],
        configs: Mapping[tuple[str, type], Mapping[str, str | Help]],
        defaults: Mapping[str, Any] | None = None,
    ):
        self._flags = flags.FlagValues()
        self._types: dict[str, Any] = {}
        self._topics = list(dict.fromkeys([*own, *(topic for topic, _ in configs)]))
        for name, full in (("help", False), ("helpshort", False), ("helpfull", True)):
            flags.DEFINE_flag(_HelpFlag(name, full), flag_values=self._flags)
        for topic, definitions in own.items():
            for name, definition in definitions.items():
                self._define(topic, name, *definition)
        for (topic, config), helps in configs.items():
            by_field = {field.name: _default(field) for field in fields(config)}
            kinds = get_type_hints(config)
            for name, text in helps.items():
                self._define(topic, name, kinds[name], by_field[name], text)
        for name, value in (defaults or {}).items():
            self._flags.set_default(name, value)

    def _define(self, topic: str, name: str, kind: Any, default: Any, text: str | Help) -> None:
        told = text if isinstance(text, Help) else Help(text)
        optional, kind = kind, _without_none(kind)
        self._types[name] = kind
        options = {**told.options(), "flag_values": self._flags}
        if get_origin(kind) is tuple:
            listed = None if default is None else [str(value) for value in default]
            flags.DEFINE_list(name, listed, told.text, **options)
        elif kind is int and optional is not int and default is not None:
            serializer: Any = flags.ArgumentSerializer()
            flags.DEFINE(
                _IntegerOrNone(), name, default, told.text, serializer=serializer, **options
            )
        else:
            define: Any = {
                bool: flags.DEFINE_boolean,
                int: flags.DEFINE_integer,
                float: flags.DEFINE_float,
                str: flags.DEFINE_string if told.choices is None else flags.DEFINE_enum,
            }[kind]
            define(name, default, help=told.text, **options)
        self._flags.register_key_flag_for_module(topic, self._flags[name])

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
        text = "\n".join(self._flags.module_help(topic) for topic in self._topics)
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


VERIFY_DATA_HELP = (
    "Compare the dataset's files with its checksums: first, before their first use; always, in "
    "every run; never"
)
LOG_FLAGS: Definitions = {
    "log_path": (
        str,
        "./log.json",
        "Path of the log; the curves are saved next to it. Default with --save_checkpoint_path: "
        "log.json in that directory",
    ),
    "tensorboard": (
        str | None,
        None,
        "Directory to write TensorBoard events to: flags, scalars, curves and the model card",
    ),
    "mlflow": (
        str | None,
        None,
        "URI of an MLflow server or store to send flags, scalars, curves and the model card to",
    ),
}
VERDICT_HELP = (
    "Print after each line of training how the steps spent their time, what limits them, and a "
    "flag to try"
)
PROFILE_HELP = Help(
    "Record this many training steps, after a warm-up of --benchmark_warmup_steps or 5 steps, "
    "whichever is more: writes a trace and a picture beside the log, and prints the longest "
    "operators",
    least=1,
)
ALLOW_LINKS_HELP = "Allow files of the dataset to be symbolic links to files outside its directory"


def one_of(choices: Iterable[str], text: str) -> str:
    """Returns the help of a flag with these values only, in absl's form."""
    return f"<{'|'.join(choices)}>: {text}"


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


def _default(field: Field) -> Any:
    return None if field.default is MISSING else field.default


def _without_none(kind: Any) -> Any:
    """Returns `int` for `int | None`."""
    if get_origin(kind) in (Union, types.UnionType):
        (kind,) = (one for one in get_args(kind) if one is not type(None))
    return kind
