"""Flags made from the settings of configurations, which describe themselves."""

import csv
import difflib
import io
import os
import platform
import re
import sys
import types
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from absl import flags

from dlrm.command_line import exit_code_of, fail, raise_file_limit, say_error, show
from dlrm.documents import brief, line_of_key, read_yaml
from dlrm.files import check_all_local, check_local
from dlrm.manifest import check_lines
from dlrm.remote.config import CacheConfig
from dlrm.remote.uri import Uri, is_uri
from dlrm.settings import Setting, defaults_of, settings_of
from dlrm.version import __version__

Config = TypeVar("Config")
_ALL_COMMANDS = """All commands:
  --config: a YAML file of flags, by name; flags of the command line take precedence
  --version: show the versions of dlrm, torch and Python, and the native parts
"""
_URI_TOO = "; may be a URI"
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


class TextAsked(Exception):  # noqa: N818  # no error
    """The command line asks for a text, such as the version, instead of a run.

    Attributes:
        text: the text.
    """

    def __init__(self, text: str):
        super().__init__()
        self.text = text


class UsageError(ValueError):
    """A command line that a command does not take, such as an unknown flag."""


class ConfigFlags:
    """The command line of a command: a flag for each setting of its configurations.

    All command lines also have --help, --version and --config, a YAML file of flags. Flags of the
    command line take precedence.

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
        self._define_texts()
        for topic, config in _with_cache([*configs]):
            kinds, by_default = get_type_hints(config), defaults_of(config)
            for name, own in settings_of(config).items():
                if name in without or name in self.settings:
                    continue
                text = (helps or {}).get(name, own.help) + _URI_TOO * bool(own.uri)
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
        self.uris = {name: own.uri for name, own in self.settings.items() if own.uri}

    def named(self, **roles: bool) -> frozenset[str]:
        """Returns the flags whose settings have a role, such as `resumable=True`."""
        return frozenset(
            name
            for name, own in self.settings.items()
            if all(getattr(own, role) == value for role, value in roles.items())
        )

    def _define_texts(self) -> None:
        def define(name: str, text: str, ask: Callable[[], Exception]) -> None:
            flags.DEFINE_flag(_AskFlag(name, text, ask), flag_values=self._flags)

        for name in ("help", "h", "helpshort", "helpfull"):
            define(name, "show the flags", partial(HelpAsked, name == "helpfull"))
        define("version", "show the versions", lambda: TextAsked(version_line()))
        flags.DEFINE_string("config", None, "YAML file of flags", self._flags)

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
        elif kind == int | str:
            flags.DEFINE(
                _IntegerOrText(), name, default, own.help, self._flags, flags.ArgumentSerializer()
            )
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
        words = self._spelled(arguments)
        try:
            rest = self._parsed(words)
            if path := self._flags["config"].value:
                rest = self._parsed([*self._words_of(path), *words])
            values = {n: self._value(n) for n in self._types if n not in self.positional}
            placed = self._placed(rest)
        except (ValueError, OSError) as error:
            raise UsageError(str(error)) from None
        for name in self.settings:
            if name in self.required and values.get(name, placed.get(name)) is None:
                raise UsageError(f"--{name}: expected a value, got none")
        given = {name for name in values if self._flags[name].present}
        return Values({**self._defaults, **values, **placed}, frozenset(given | placed.keys()))

    def _parsed(self, words: Sequence[str]) -> list[str]:
        """Sets the flags to those of a command line, and returns its other words."""
        self._flags.unparse_flags()
        for name in self._flags:
            self._flags[name].unparse()
        return parse_flags(self._flags, ["", *words], self._pass_on, self.uris)[1:]

    def _words_of(self, path: str) -> list[str]:
        """Returns the flags of a YAML file that the command line does not have."""
        given = {name for name in self._flags if self._flags[name].present}
        words: dict[str, list[str]] = {}
        for key, value in read_yaml(path).items():
            name = str(key).replace("-", "_")
            try:
                if name not in self.settings or name in self.positional:
                    near = "" if name in self._flags else did_you_mean(name, self._flags)
                    raise ValueError(f"unknown flag {brief(key)}{near}")
                if name in words:
                    raise ValueError(f"{brief(key)} is a duplicate key, as - stands for _")
                words[name] = [] if value is None else [*self._words_for(str(key), name, value)]
                self._parsed(words[name])
                self._value(name)
            except ValueError as error:
                line = line_of_key(path, str(key))
                raise ValueError(f"{path}: {f'line {line}: ' if line else ''}{error}") from None
        return [word for name, own in words.items() if name not in given for word in own]

    def _words_for(self, place: str, name: str, value: Any) -> Iterator[str]:
        own = self.settings[name]
        if isinstance(value, bool):
            if self._types[name] is not bool:
                raise ValueError(f"{place}: expected no switch, got {value}; a text has quotes")
            yield f"--{name}" if value else f"--no{name}"
        elif not isinstance(value, list):
            if isinstance(value, dict):
                raise ValueError(f"{place}: expected a value or a list, got {brief(value)}")
            yield f"--{name}={value}"
        elif own.repeated or own.words:
            yield from (f"--{name}={item}" for item in value)
        elif get_origin(self._types[name]) is tuple:
            csv.writer(joined := io.StringIO(), lineterminator="").writerow(value)
            yield f"--{name}={joined.getvalue()}"
        else:
            raise ValueError(f"{place}: expected one value, got {brief(value)}")

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
        named = plain[2:].removeprefix("_") if plain.startswith("no") else ""
        return f"--no{named}" if named in self._flags else word

    def _placed(self, words: list[str]) -> dict[str, Any]:
        """Returns the values of positional arguments."""
        values: dict[str, Any] = {}
        rest = words
        for name in self.positional:
            many = get_origin(self._types[name]) is tuple
            own, rest = (rest, []) if many else (rest[:1], rest[1:])
            if own:
                _check_paths(name, name, own, self.uris)
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


def help_of_all() -> str:
    """Returns the flags that every command has, with their meaning."""
    return f"{_ALL_COMMANDS}\nabsl.flags:\n{flags.FlagValues().get_help(prefix='  ')}"


def version_line() -> str:
    """Returns the versions of dlrm, torch and Python, and the native parts, without importing any.

    An operator that was built for another machine counts; `dlrm doctor` tries them.
    """
    from importlib import metadata, util  # which takes 30 ms

    folder = Path(__file__).parent
    try:
        torch = metadata.version("torch")
    except metadata.PackageNotFoundError:
        torch = "missing"
    operators = [name for name in ("cpu", "cuda") if (folder / f"_ops_{name}.so").is_file()]
    parser = util.find_spec("dlrm._host") is not None
    return (
        f"dlrm {__version__} (torch {torch}; native operators: "
        f"{' and '.join(operators) or 'none'}; log parser: {'yes' if parser else 'no'}; "
        f"Python {platform.python_version()})"
    )


class _AskFlag(flags.BooleanFlag):
    """Ends parsing, whatever else the command line has, right or wrong."""

    def __init__(self, name: str, text: str, ask: Callable[[], Exception]):
        super().__init__(name, False, text, "?" if name == "help" else None)
        self._ask = ask

    def parse(self, argument: Any) -> None:
        if self._parse(argument):
            raise self._ask()


def did_you_mean(name: str, values: flags.FlagValues) -> str:
    """Returns a question with up to three flags that a user may mean, if there are any.

    They are flags whose names differ by a slip or, if there are none, contain the unknown one, are
    similar, or have meanings with its words.

    Args:
        name: the unknown flag, such as `learning_rate`.
        values: the flags, such as `lr` with the meaning "Base learning rate".
    """
    near = difflib.get_close_matches(name, values, cutoff=0.85)
    containing = [known for known in values if len(name) > 2 and name in known]
    near = near or sorted(containing, key=lambda known: (not known.endswith("_path"), len(known)))
    near = near or difflib.get_close_matches(name, values) or _flags_about(name, values)
    return f". Did you mean: {', '.join(near[:3])} ?" if near else ""  # in absl's words


def _flags_about(name: str, values: flags.FlagValues) -> list[str]:
    """Returns the flags with the words of a name in their meanings, those of the phrase first.

    A meaning that names a flag, such as "instead of --lr", is not about that flag.
    """
    phrase = name.replace("_", " ").lower()
    texts = {f"{known.replace('_', ' ')}: {values[known].help}".lower(): known for known in values}
    begins = [re.compile(rf"(?<!-)\b{re.escape(word)}") for word in phrase.split()]
    said = [text for text in texts if all(begin.search(text) for begin in begins)]
    said = [text for text in said if phrase in text] or said
    return [texts[text] for text in sorted(said, key=lambda text: text.find(phrase))]


class _IntegerOrNone(flags.IntegerParser):
    def parse(self, argument: Any) -> Any:
        return None if argument in (None, "None", "none") else super().parse(argument)


class _IntegerOrText(flags.ArgumentParser):
    syntactic_help = "an integer or a text"

    def parse(self, argument: Any) -> Any:
        return int(argument) if re.fullmatch(r"[+-]?\d+", str(argument)) else argument


def run_command(
    line: "ConfigFlags | Subcommands",
    act: Callable[["Values"], int | None],
    doc: str | None,
    arguments: Sequence[str] | None = None,
    *,
    usage: int | None = None,
    code: int = 1,
    at_store: Callable[["Values"], Collection[str]] = lambda values: (),
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
            roles, own = _roles(line, values), values.without(settings_of(CacheConfig))
            if left := at_store(values):
                roles, own = {name: roles[name] for name in roles.keys() - left}, values
            if not any(is_uri(v) for n in roles for v in _items(values[n])):
                return act(own)
            from dlrm.remote.edges import run_locally

            return run_locally(values, roles, lambda local: act(own.replaced(local)))
        except HelpAsked as asked:
            show(_with_hint(f"{doc}\n{asked.text or line.help()}", asked))
            return 0
        except TextAsked as asked:
            show(asked.text)
            return 0
        except UsageError as error:
            return say_error(error, code if usage is None else usage)

    return exit_code_of(run, code=code, **others)


def _roles(line: "ConfigFlags | Subcommands", values: "Values") -> dict[str, str]:
    """Returns the flags that may be URIs, with their roles."""
    return (line if isinstance(line, ConfigFlags) else line.lines[values["task"]][1]).uris


def _items(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list | tuple) else [value]


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
        text = _with_hint(help_text(), asked)
    except TextAsked as asked:
        text = asked.text
    except ValueError as error:
        fail(error)
    if code := exit_code_of(lambda: show(text)):
        sys.exit(code)
    return None


def _with_hint(text: str, asked: HelpAsked) -> str:
    """Returns a help with the flags that every command has, or with the flag that shows them."""
    hint = "Try --helpfull to get a list of all flags."
    return f"{text}\n\n{help_of_all() if asked.full else hint}"


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
        return Values({**self, **taken}, self.given)

    def config(self, cls: type[Config], **others: Any) -> Config:
        """Makes a configuration from the flags that have its fields' names, and `others`.

        Raises:
            ValueError: the configuration refuses a value.
        """
        own = {f.name: self[f.name] for f in fields(cls) if f.name in self}  # type: ignore[arg-type]
        return cls(**{**own, **others})


def _without_none(kind: Any) -> Any:
    """Returns `int` for `int | None`, and `int | str` as it is."""
    of = get_args(kind) if get_origin(kind) in (Union, types.UnionType) else ()
    return next(one for one in of if one is not type(None)) if type(None) in of else kind


def parse_flags(
    values: flags.FlagValues,
    arguments: list[str],
    known_only: bool = False,
    uris: Collection[str] = (),
) -> list[str]:
    """Parses flags, those of `--flagfile` too, at the start of a command; returns the rest.

    Args:
        arguments: the command's name and the words after it.
        known_only: whether unknown flags are part of the rest.
        uris: names of flags that may be URIs.

    Raises:
        ValueError: an unknown flag, a value that a flag cannot have, a URI where a path is
            expected, or a file without flags.
    """
    raise_file_limit()
    _check_flag_files(arguments)
    try:
        rest = values(arguments, known_only)
    except flags.UnrecognizedFlagError as error:
        name = error.flagname
        raise ValueError(
            f"Unknown command line flag '{name}'{did_you_mean(name, values)}"
        ) from None
    except flags.Error as error:
        if isinstance(error.__context__, FileNotFoundError):
            check_local(error.__context__.filename, "--flagfile")
        raise ValueError(str(error).removeprefix("ERROR:: ")) from None
    except UnicodeDecodeError as error:
        raise ValueError(f"--flagfile: expected text in UTF-8, got byte {error.start}") from None
    except RecursionError:
        raise ValueError("--flagfile: expected files that do not name each other") from None
    for flag in {values[name] for name in values if values[name].present}:
        _check_paths(f"--{flag.name}", flag.name, flag.value, uris)
    return rest


def _check_paths(shown: str, name: str, value: Any, uris: Collection[str]) -> None:
    """Raises ValueError for a URI in a flag that takes none, or a wrong one in one that does."""
    try:
        if name not in uris:
            check_all_local([(shown, value)])
            return
    except ValueError as error:
        told = uris and "got a URI" in str(error)
        more = f"; flags that take URIs: {', '.join(uris)}" if told else ""
        raise ValueError(f"{error}{more}") from None
    for item in _items(value):
        if not is_uri(item) or os.fspath(item).lower().startswith("file:"):
            check_all_local([(shown, item)])
            continue
        try:
            Uri.parse(item)
        except ValueError as error:
            raise ValueError(f"{shown} {error}") from None


def _with_cache(configs: list[tuple[str, type]]) -> list[tuple[str, type]]:
    """Returns configurations with that of the cache, if a setting of theirs may be a URI."""
    takes = any(own.uri for _, config in configs for own in settings_of(config).values())
    return [*configs, ("URIs", CacheConfig)] if takes else configs


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
