"""The command line: flags and `--help` generated from `Config`, a YAML file under them, and the `oasis-tp` command."""

import argparse
import ast
import difflib
import importlib
import inspect
import json
import os
import re
import shutil
import sys
import textwrap
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from typing import IO, Any, Literal, Union, get_args, get_origin, get_type_hints

from oasis_tp import __version__
from oasis_tp.config import Config
from oasis_tp.validation import validate

COMMANDS = {
    "serve": "the OpenAI-compatible HTTP server",
    "batch": "a file of requests answered into another, resumable",
    "generate": "one prompt to the terminal, with KV tier statistics",
    "slurm": "a Slurm job script for any of these",
    "bench": "measurements: quality, decode speed, serving",
    "collect-env": "what this machine has, for a report of a fault",
}
NOT_HERE = {
    "--enable-prefix-caching": "prompts do not share KV between requests yet (choices of one request do)",
    "--pipeline-parallel-size": "layers are not split over ranks; --tensor-parallel-size splits heads",
    "--swap-space": "KV beyond the device lives in the host tier: --host-kv-gb, or --kv-offloading-size",
    "--cpu-offload-gb": "weights stay on the device; KV beyond it lives in the host tier (--host-kv-gb)",
    "--quantization": "weights are used in --dtype; quantised .gguf files are dequantised when they are loaded",
    "--trust-remote-code": "no code of a model is ever run: leave the option out",
}
"""Options that people bring from elsewhere, and why they cannot be had."""
SUFFIXES = {"": 1, "k": 10**3, "K": 2**10, "m": 10**6, "M": 2**20}
SPECULATIVE_KEYS = {
    "method": "spec_method",
    "model": "spec_model",
    "num_speculative_tokens": "spec_tokens",
    "prompt_lookup_max": "prompt_lookup_max",
    "prompt_lookup_min": "prompt_lookup_min",
}
"""Keys of --speculative-config, as vLLM names them, and the flags they stand for."""
SHORT_FLAGS = {"tensor_parallel_size": ("-tp",)}


@dataclass(frozen=True, kw_only=True, slots=True)
class Flag:
    """One field of one section of `Config`, as the command line sees it."""

    section: str
    name: str
    hint: Any
    default: Any
    help: str

    @property
    def option(self) -> str:
        return "--" + self.name.replace("_", "-")


def config_flags() -> list[Flag]:
    """Every flag, in the order of `Config`; help texts are the strings under the fields."""
    flags = []
    for section, cls in get_type_hints(Config).items():
        hints, docs = get_type_hints(cls), _field_docs(cls)
        for field in fields(cls):
            assert field.default is not MISSING, f"{cls.__name__}.{field.name} needs a default"
            flags.append(
                Flag(
                    section=section,
                    name=field.name,
                    hint=hints[field.name],
                    default=field.default,
                    help=docs[field.name],
                )
            )
    assert len({flag.name for flag in flags}) == len(flags), "two sections share a field name"
    return flags


def parse_config(
    argv: Sequence[str] | None,
    prog: str,
    description: str,
    extra: Callable[[argparse.ArgumentParser], None] | None = None,
) -> tuple[Config, argparse.Namespace]:
    """Read the command line and the file of `--config`; flags win over the file, the file over the defaults.

    Args:
        argv: arguments without the program's name; None: `sys.argv[1:]`.
        prog: the program's name in usage and errors.
        description: one sentence for `--help`.
        extra: adds an entry's own options to the parser; they come back in the namespace.

    Exits with status 2 and one clear message for whatever is wrong: an unknown flag or file key (with the nearest
    known one), a value of the wrong type or outside its range.
    """
    parser = _parser(prog, description)
    if extra is not None:
        extra(parser)
    given, rest = parser.parse_known_args(argv)
    unknown = [arg for arg in rest if arg.startswith("-") and arg != "--"]
    if unknown:
        name = unknown[0].split("=")[0]
        if name in NOT_HERE:
            parser.error(f"{name}: {NOT_HERE[name]}")
        parser.error(f"unknown option {name}{_nearest(name, parser._option_string_actions)}")
    positional = [arg for arg in rest if arg != "--"]
    if len(positional) > 1:
        parser.error(f"more than one model given: {' '.join(positional)}")
    if positional:
        if getattr(given, "model", positional[0]) != positional[0]:
            parser.error(f"the model is given twice: {positional[0]} and --model {given.model}")
        given.model = positional[0]

    values: dict[str, Any] = {}
    try:
        if given.config is not None:
            file_parser = _parser(f"{prog}: {given.config}", description)
            values |= _spread(vars(file_parser.parse_args(_file_arguments(given.config))))
        values |= _spread(vars(given))
        config = _build(values)
        validate(config)
    except ValueError as error:
        parser.error(str(error))
    own = {flag.name for flag in config_flags()} | {"config", "speculative_config"}
    return config, argparse.Namespace(**{name: value for name, value in vars(given).items() if name not in own})


def speculative_options(given: object) -> dict[str, Any]:
    """Fields of `SpeculationConfig` from a mapping with vLLM's names for them.

    Raises:
        ValueError: it is no mapping, names no method, or has a key or a type of value that is not known.
    """
    known = ", ".join(SPECULATIVE_KEYS)
    if not isinstance(given, Mapping):
        raise ValueError(f"--speculative-config is {given!r:.80}; allowed: a JSON object with the keys {known}")
    flags = {flag.name: flag for flag in config_flags()}
    options = {}
    for key, value in given.items():
        if key not in SPECULATIVE_KEYS:
            raise ValueError(
                f"--speculative-config: unknown key {key}{_nearest(str(key), SPECULATIVE_KEYS)} (keys: {known})"
            )
        name = SPECULATIVE_KEYS[key]
        kind = type(flags[name].default)
        if type(value) is not kind:
            wanted = {str: "a string", int: "a whole number"}[kind]
            raise ValueError(f"--speculative-config: {key} is {value!r:.80}; allowed: {wanted}")
        options[name] = value
    if "method" not in given:
        methods = ", ".join(get_args(flags["spec_method"].hint))
        raise ValueError(f"--speculative-config: method is missing; allowed: {methods}")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """The `oasis-tp` command: hand the rest of the line to `oasis_tp.<command>`."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    lines = [f"  {name:<13}{text}" for name, text in COMMANDS.items()]
    usage = "\n".join(["usage: oasis-tp COMMAND [options]", "", *lines, "", "oasis-tp COMMAND --help lists options."])
    if not arguments or arguments[0] in ("-h", "--help"):
        say(usage + "\n", sys.stdout if arguments else sys.stderr)
        return 0 if arguments else 2
    command, *rest = arguments
    if command == "--version":
        print(f"oasis-tp {__version__}")
        return 0
    if command not in COMMANDS:
        print(f"oasis-tp: error: unknown command {command}{_nearest(command, COMMANDS)}", file=sys.stderr)
        return 2
    return importlib.import_module(f"oasis_tp.{command.replace('-', '_')}").main(rest)


def say(text: str, file: IO[str]) -> None:
    """Print, whether or not anybody still reads (`--help | head`)."""
    try:
        file.write(text)
        file.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), file.fileno())  # or the interpreter would complain at its end


class _Parser(argparse.ArgumentParser):
    def _print_message(self, message: str, file: Any = None) -> None:
        if message:
            say(message, file or sys.stderr)


def _parser(prog: str, description: str) -> argparse.ArgumentParser:
    """A parser of all `Config` flags that records only what was given."""
    width = min(100, shutil.get_terminal_size().columns)
    parser = _Parser(
        prog=prog,
        usage="%(prog)s [MODEL] [options]",
        description=description,
        epilog="Whole numbers take a suffix: k = 1,000, K = 1,024, m = 1,000,000, M = 1,048,576.",
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=30, width=width),
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"oasis-tp {__version__}")
    parser.add_argument("--config", metavar="FILE", help="YAML file of flag: value lines; flags win over the file.")
    groups = {
        name: parser.add_argument_group(name, inspect.getdoc(cls)) for name, cls in get_type_hints(Config).items()
    }
    for flag in config_flags():
        groups[flag.section].add_argument(
            flag.option, *SHORT_FLAGS.get(flag.name, ()), dest=flag.name, default=argparse.SUPPRESS, **_keywords(flag)
        )
    groups["speculation"].add_argument(
        "--speculative-config",
        metavar="JSON",
        type=_json,
        default=argparse.SUPPRESS,
        help="The flags of this group in one object, by vLLM's names: " + ", ".join(SPECULATIVE_KEYS) + ".",
    )
    return parser


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r:.80} is no JSON: {error}") from None


def _spread(values: dict[str, Any]) -> dict[str, Any]:
    """The same with the options of --speculative-config in its place.

    Raises:
        ValueError: an option that stands both there and on its own, with different values.
    """
    if "speculative_config" not in values:
        return values
    rest = {name: value for name, value in values.items() if name != "speculative_config"}
    options = speculative_options(values["speculative_config"])
    for name, value in options.items():
        if rest.get(name, value) != value:
            option = "--" + name.replace("_", "-")
            raise ValueError(f"{option} {rest[name]} and --speculative-config contradict each other: {value!r} there")
    return rest | options


def _keywords(flag: Flag) -> dict[str, Any]:
    """The `add_argument` keywords that follow from a field's type."""
    text = flag.help
    if not re.search(r"\bDefault\b", text) and flag.default not in (None, ()):
        shown = {True: "on", False: "off"}[flag.default] if isinstance(flag.default, bool) else flag.default
        text += f" (default: {shown})"
    text = text.replace("%", "%%")
    options = [option for option in get_args(flag.hint) if option is not type(None)] if _is_union(flag.hint) else []
    hint = options[0] if len(options) == 1 else flag.hint
    if hint is bool:
        return {"help": text, "action": argparse.BooleanOptionalAction}
    if get_origin(hint) is Literal:
        return {"help": text, "choices": get_args(hint), "type": type(get_args(hint)[0])}
    if get_origin(hint) is tuple:
        return {
            "help": text,
            "nargs": "+",
            "type": _scalar(get_args(hint)[0]),
            "metavar": flag.name.split("_")[-1].upper(),
        }
    if len(options) > 1:
        words = [word for option in options if get_origin(option) is Literal for word in get_args(option)]
        (number,) = [option for option in options if get_origin(option) is not Literal]
        return {"help": text, "type": _word_or(words, _scalar(number)), "metavar": "|".join([*words, "N"])}
    return {"help": text, "type": _scalar(hint), "metavar": {int: "N", float: "X", str: "TEXT"}[hint]}


def _scalar(kind: type) -> Callable[[str], Any]:
    return _whole_number if kind is int else kind


def _whole_number(text: str) -> int:
    """`4096`, `4k` (4,000), `4K` (4,096); a fraction is allowed before a suffix (`1.5k`)."""
    match = re.fullmatch(r"([+-]?\d+)(\.\d+)?([kKmM]?)", text.strip())
    if match is None or (match[2] and not match[3]):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number (suffixes k, K, m, M allowed)")
    return (
        int(match[1]) * SUFFIXES[match[3]] if not match[2] else round(float(match[1] + match[2]) * SUFFIXES[match[3]])
    )


def _word_or(words: Sequence[str], number: Callable[[str], Any]) -> Callable[[str], Any]:
    def convert(text: str) -> Any:
        if text in words:
            return text
        try:
            return number(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is neither {' nor '.join(words)} nor a number") from None

    return convert


def _file_arguments(path: str) -> list[str]:
    """The flags that a YAML file stands for, so that file and command line are read by one parser."""
    import yaml

    try:
        with open(path, encoding="utf-8") as file:
            content = yaml.safe_load(file)
    except (OSError, yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"--config {path}: {' '.join(str(error).split())}") from error
    if content is None:
        return []
    if not isinstance(content, dict):
        raise ValueError(f"--config {path}: expected lines of `flag: value`, found a {type(content).__name__}")
    flags = {flag.name: flag for flag in config_flags()}
    arguments: list[str] = []
    for key, value in content.items():
        flag = flags.get(str(key).replace("-", "_"))
        if str(key).replace("-", "_") == "speculative_config":
            arguments.append(f"--speculative-config={value if isinstance(value, str) else json.dumps(value)}")
            continue
        if flag is None:
            raise ValueError(f"--config {path}: unknown key {key}{_nearest(str(key).replace('_', '-'), _options())}")
        if flag.hint is bool:
            if not isinstance(value, bool):
                raise ValueError(f"--config {path}: {key} is {value!r}; allowed: true, false")
            arguments.append(flag.option if value else f"--no-{flag.option[2:]}")
        elif isinstance(value, list):
            if get_origin(flag.hint) is not tuple:
                raise ValueError(f"--config {path}: {key} takes one value, not a list")
            arguments += [flag.option, *map(str, value)] if value else []
        elif isinstance(value, dict):
            raise ValueError(f"--config {path}: {key} takes one value, not a mapping")
        elif value is not None:
            arguments.append(f"{flag.option}={value}")
    return arguments


def _build(values: dict[str, Any]) -> Config:
    """`Config` from the values given, by field name."""
    sections: dict[str, dict[str, Any]] = {}
    for flag in config_flags():
        if flag.name in values:
            value = values[flag.name]
            sections.setdefault(flag.section, {})[flag.name] = tuple(value) if isinstance(value, list) else value
    hints = get_type_hints(Config)
    return Config(**{section: hints[section](**given) for section, given in sections.items()})


def _field_docs(cls: type) -> dict[str, str]:
    """The string under each field of a class, on one line."""
    body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    assert isinstance(body, ast.ClassDef)
    docs = {}
    for statement, after in zip(body.body, body.body[1:], strict=False):
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            name = statement.target.id
            assert isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant), f"{name} has no docstring"
            docs[name] = " ".join(str(after.value.value).split())
    return docs


def _is_union(hint: Any) -> bool:
    return get_origin(hint) in (Union, types.UnionType)


def _options() -> list[str]:
    return [*(flag.option for flag in config_flags()), "--speculative-config"]


def _nearest(name: str, known: Sequence[str] | dict[str, Any]) -> str:
    """` (did you mean …?)`, or nothing when no known name is close."""
    bare = {candidate.lstrip("-"): candidate for candidate in known}
    close = difflib.get_close_matches(name.lstrip("-"), bare, n=1)
    return f"; did you mean {bare[close[0]]}?" if close else ""


if __name__ == "__main__":
    sys.exit(main())
