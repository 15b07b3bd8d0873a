"""Translates command lines of Graphcore's programs, which two source documents print."""

import difflib
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from dlrm.published.documents import ipu_bert_flags, ipu_flags
from dlrm.published.documents.ipu_flags import FlagValues, Option


@dataclass(frozen=True)
class TranslatedFlag:
    """Result of translating a flag.

    Attributes:
        name: of the flag, in full.
        value: its values, separated by spaces; "true" for a switch.
        status: "mapped", "approximated" or "ignored".
        text: our flags, the difference, or the reason for ignoring the flag.
        origin: "printed", "config " and the configuration that sets it, or "default" for a default
            of the program.
    """

    name: str
    value: str
    status: str
    text: str
    origin: str = "printed"


@dataclass(frozen=True)
class Translation:
    """A command line of ours, and its derivation.

    Attributes:
        command: module of `dlrm.scripts`.
        flags: its command line without the data.
        processes: replicas, with one process each.
        nodes: machines that the processes are on.
        dataset: data to read, below $DATASETS_DIR; None if they are synthetic.
        records: one for each flag that is printed, of the configuration, or a default.
    """

    command: str
    flags: tuple[str, ...]
    processes: int
    nodes: int
    dataset: str | None
    records: tuple[TranslatedFlag, ...]


@dataclass(frozen=True)
class _Program:
    """Flags and defaults of a program.

    Attributes:
        command: module of `dlrm.scripts` that does the same.
        options: its flags, in full.
        defaults: from the flags that are given to the values of others.
        configs: its named configurations, as command lines.
        mode: our flags of each of its runs.
        replicas: the flag with the number of replicas; None if only the launcher sets it.
        dataset: the flag that names the data.
    """

    command: str
    options: Mapping[str, Option]
    defaults: Callable[[FlagValues], dict[str, str]]
    configs: Mapping[str, str]
    mode: tuple[str, ...]
    replicas: str | None
    dataset: str


_PROGRAMS = {
    "train.py": _Program(
        "cnn",
        ipu_flags.TRAIN,
        ipu_flags.train_defaults,
        ipu_flags.TRAIN_CONFIGS,
        ("--mode=train", "--recipe=graphcore"),
        "--replicas",
        "--dataset",
    ),
    "validation.py": _Program(
        "cnn",
        ipu_flags.VALIDATION,
        ipu_flags.validation_defaults,
        {},
        ("--mode=benchmark_inference", "--recipe=graphcore"),
        None,
        "--dataset",
    ),
    "bert.py": _Program(
        "bert",
        ipu_bert_flags.BERT,
        ipu_bert_flags.bert_defaults,
        ipu_bert_flags.BERT_CONFIGS,
        ("--recipe=graphcore",),  # a separate flag sets the mode
        "--replication-factor",
        "--input-files",
    ),
}
_Given = list[tuple[str, str]]  # flags in full, with their values, in order


def translate(printed: str) -> Translation:
    """Returns the translation of a printed command line.

    Args:
        printed: `python train.py ...`, `validation.py` or `bert.py`, perhaps after `poprun ...`.
            Variables such as $DATASETS_DIR are kept.

    Raises:
        ValueError: a program, flag, value or configuration is unknown; the message has the nearest.
    """
    launch, name, arguments = _divided(printed)
    program, launcher = _PROGRAMS[name], ipu_flags.POPRUN
    if program.replicas:
        launcher = launcher | {"--num-replicas": program.options[program.replicas]}
    launched = _read(launch, launcher, "poprun")
    own = _read(arguments, program.options, name)
    config = _configured(dict(own).get("--config"), program)
    given = {**dict(config), **dict(own)}
    replicas = dict(launched).get("--num-replicas")
    if replicas and program.replicas:
        given[program.replicas] = replicas
    default = {flag: v for flag, v in program.defaults(given).items() if flag not in given}
    values = {**given, **default}
    entries = [
        *_entries(launched, "printed", launcher, dict(launched)),
        *_entries(own, "printed", program.options, values),
        *_entries(config, f"config {values.get('--config')}", program.options, values),
        *_entries(list(default.items()), "default", program.options, values),
    ]
    flags = [*program.mode, *(flag for _, ours in entries for flag in ours.split())]
    flags.sort(key=lambda flag: not flag.startswith("--mode="))
    return Translation(
        program.command,
        tuple(dict.fromkeys(flags)),
        int(replicas or values.get(program.replicas or "", "1")),
        len(dict(launched).get("--host", "").split(",")),
        _dataset(values, program, name),
        tuple(record for record, _ in entries),
    )


def _divided(printed: str) -> tuple[list[str], str, list[str]]:
    """Returns the launcher's flags, the program, and the program's flags."""
    tokens = shlex.split(printed)
    places = [i for i, token in enumerate(tokens) if token in ("python", "python3")]
    start = places[0] if places else len(tokens)
    name = tokens[start + 1] if start + 1 < len(tokens) else ""
    if name not in _PROGRAMS or (start and tokens[0] != "poprun"):
        raise ValueError(
            f"{' '.join(tokens[:3])} ...: expected python or poprun ... python, and one of "
            f"{', '.join(_PROGRAMS)}"
        )
    return tokens[1:start], name, tokens[start + 2 :]


def _read(tokens: Sequence[str], options: Mapping[str, Option], program: str) -> _Given:
    found: _Given = []
    rest = list(tokens)
    while rest:
        given, has_value, value = rest.pop(0).partition("=")
        name = _in_full(given, options, program)
        count = options[name].count
        values = [value] if has_value else []
        most = len(rest) if count is None else 0 if has_value else count
        while rest and len(values) < most and not re.match(r"--?[a-zA-Z]", rest[0]):
            values.append(rest.pop(0))
        if count != 0 and not values:
            raise ValueError(f"{name}: expected a value")
        found.append((name, " ".join(values) or "true"))
    return found


def _in_full(given: str, options: Mapping[str, Option], program: str) -> str:
    """Returns the flag that `given` names or, as in argparse, abbreviates."""
    if given in options:
        return given
    begun = [name for name in options if given.startswith("--") and name.startswith(given)]
    if len(begun) == 1:
        return begun[0]
    near = begun or difflib.get_close_matches(given, options, n=3, cutoff=0.5)
    hint = f"; nearest: {', '.join(near)}" if near else ""
    raise ValueError(f"{given}: expected a flag of {program} that is known here{hint}")


def _configured(asked: str | None, program: _Program) -> _Given:
    if asked is None:
        return []
    if asked not in program.configs:
        raise ValueError(f"--config {asked}: expected one of {', '.join(program.configs)}")
    return _read(shlex.split(program.configs[asked]), program.options, asked)


def _entries(
    given: _Given, origin: str, options: Mapping[str, Option], values: FlagValues
) -> Iterator[tuple[TranslatedFlag, str]]:
    """Yields a record of each flag, and our flags for it."""
    last = {name: index for index, (name, _) in enumerate(given)}
    for index, (name, value) in enumerate(given):
        if last[name] != index or values[name] != value:
            again = "printed again later; the last counts" if last[name] != index else ""
            why = again or f"{values[name]} is given on the command line"
            yield TranslatedFlag(name, value, "ignored", why, origin), ""
            continue
        ours = _ours(options[name], name, values)
        status, why = _status(options[name], value, ours)
        yield (
            TranslatedFlag(name, value, status, "; ".join(filter(None, (ours, why))), origin),
            ours,
        )


def _status(option: Option, value: str, ours: str) -> tuple[str, str]:
    """Returns the status of a value's translation, and a note beside our flags."""
    if value in option.rough:
        return "approximated", option.rough[value]
    if value == "false" and not ours and option.status != "ignored":
        return "mapped", "off, as it is here without a flag"
    return option.status, "" if ours and option.status == "mapped" else option.why


def _ours(option: Option, name: str, values: FlagValues) -> str:
    """Our flags for a flag, separated by spaces."""
    value = values[name]
    if option.choices is not None:
        if value not in option.choices:
            raise ValueError(f"{name} {value}: expected one of {', '.join(option.choices)}")
        value = option.choices[value]
    if callable(option.ours):
        return option.ours(values)
    return option.ours.format(value.replace(" ", ","))


def _dataset(values: FlagValues, program: _Program, name: str) -> str | None:
    if "true" in (values.get("--synthetic-data"), values.get("--generated-data")):
        return None
    if name == "validation.py":
        raise ValueError("validation.py: expected --synthetic-data or --generated-data")
    if program.dataset not in values:
        raise ValueError(f"{name}: expected {program.dataset}")
    return values[program.dataset].removeprefix("$DATASETS_DIR/")
