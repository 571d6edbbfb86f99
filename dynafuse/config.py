"""The options: one declaration each, from which values, keys, errors and the table of docs/options.md derive.

    >>> config = resolve("reduce-overhead", {"workers": 0}, {"DYNAFUSE_STRICT": "1"})
    >>> config.cudagraphs, config.workers, config.strict
    (True, 0, True)
    >>> config.key()
    (('round_like_eager', False), ('fallback_random', False), ('check_indices', True))

An option is looked for in the call's `options`, then in the environment, then in what `mode` stands for; its default
comes last. The backend resolves once per graph, when it compiles it, so a changed variable holds for the next graph.
Nothing here imports torch.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dynafuse.errors import OptionError
from dynafuse.lowering.registry import EAGER, names

PREFIX = "DYNAFUSE_"
COST_PREFIX = "DYNAFUSE_COST_"
DEFAULT_MODE = "default"
MODES: Mapping[str, Mapping[str, object]] = {
    DEFAULT_MODE: {}, "reduce-overhead": {"cudagraphs": True},
    "max-autotune": {"tune": "always", "cudagraphs": True}, "max-autotune-no-cudagraphs": {"tune": "always"}}
"""The modes of `torch.compile`, and the options that each stands for."""

FORCE_MARK = "dynafuse_force"
"""Under which key of a node's annotation `force_backend` leaves (executor, strict, decorated class)."""

RESERVED: Mapping[str, str] = {
    "DYNAFUSE_CACHE_DIR": "directory of the kernel cache; default: the user's cache directory",
    "DYNAFUSE_NVFUSER_UNMATCHED": "load an nvFuser that was built for another torch version than the one at hand",
}
"""Variables that other modules read by themselves; declared here so that a misspelt one is an error all the same."""

_TRUTH = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
_cost_constants: dict[str, str] = {}


@dataclass(frozen=True)
class Kind:
    """A type of value: how a variable's text becomes one (`parse`) and which values it takes (`check`).

    Both raise ValueError on what they do not take; `expected` completes the sentence "expected ..." for the user.
    """

    expected: str
    parse: Callable[[str], object]
    check: Callable[[Any], object]


@dataclass(frozen=True)
class Option:
    """One declared option. A default of None makes None a valid value; `in_key` says that it changes generated code."""

    name: str
    default: object
    kind: Kind
    env: str
    doc: str
    in_key: bool = False
    choices: tuple[str, ...] | Callable[[], tuple[str, ...]] | None = None
    formerly: str = ""  # an older name, which is still taken, in the environment too

    @property
    def expected(self) -> str:
        """Return which values are valid, in words."""
        parts = [self.kind.expected]
        if self._names:
            parts.append(f"out of {', '.join(self._names)}")
        if self.default is None:
            parts.append("or None")
        return " ".join(parts)

    @property
    def _names(self) -> tuple[str, ...]:
        """Return the names that are valid; none where any value is."""
        return self.choices() if callable(self.choices) else self.choices or ()

    def from_text(self, text: str) -> object:
        """Return the value that the environment variable's text stands for.

        Raises:
            OptionError: The text stands for no value that the option takes.
        """
        try:
            return self._checked(self.kind.parse(text))
        except ValueError:
            raise OptionError.ill_typed(f"environment variable {self.env}", text, self.expected) from None

    def from_value(self, value: object) -> object:
        """Return the value as given in `options`, checked and in its stored type.

        Raises:
            OptionError: The value is of another type, or not one that the option takes.
        """
        if value is None and self.default is None:
            return None
        try:
            return self._checked(value)
        except (ValueError, OverflowError):
            raise OptionError.ill_typed(f"option {self.name!r}", value, self.expected) from None

    def _checked(self, value: object) -> object:
        value = self.kind.check(value)
        if self._names:
            _require(set(value if isinstance(value, tuple) else [value]) <= set(self._names))
        return value


def _require(condition: bool) -> None:
    if not condition:
        raise ValueError


def _parse_bool(text: str) -> bool:
    _require(text.lower() in _TRUTH)
    return _TRUTH[text.lower()]


def _check_bool(value: object) -> object:
    _require(isinstance(value, bool))
    return value


def _check_text(value: object) -> object:
    _require(isinstance(value, str) and bool(value.strip()))
    return value


def _check_path(value: str | os.PathLike[str]) -> Path:
    _require(isinstance(value, (str, os.PathLike)) and bool(str(value).strip()))
    return Path(value).expanduser()


def _check_executors(value: Any) -> tuple[str, ...]:
    """Return names in the order given, once each; eager is always allowed, so it is added last when it is missing."""
    given = value.split(",") if isinstance(value, str) else value
    _require(isinstance(given, (list, tuple)) and all(isinstance(name, str) for name in given))
    return tuple(dict.fromkeys([*(name.strip() for name in given), EAGER]))


def _at_least(minimum: int) -> Callable[[object], object]:
    def check(value: object) -> object:
        _require(isinstance(value, int) and not isinstance(value, bool) and value >= minimum)
        return value

    return check


def _check_cost(value: Any) -> float:
    _require(isinstance(value, (int, float)) and not isinstance(value, bool))
    number = float(value)
    _require(math.isfinite(number) and number >= 0)
    return number


def _check_costs(value: Any) -> dict[str, float]:
    _require(isinstance(value, Mapping))
    return {_known_cost(name): _check_cost(number) for name, number in value.items()}


def _parse_force(text: str) -> object:
    """Parse ``"model.*.mlp=triton, head=eager?"`` into a dict."""
    entries = [entry.partition("=") for entry in text.split(",")]
    for pattern, equals, _ in entries:
        if not equals:
            raise OptionError(f"force entry {pattern.strip()!r} names no executor: expected {FORCE.expected}")
    return {pattern.strip(): executor.strip() for pattern, _, executor in entries}


def _check_force(value: Any) -> dict[str, str]:
    entries: Any = _parse_force(value) if isinstance(value, str) else value
    _require(isinstance(entries, Mapping))
    for pattern, executor in entries.items():
        if not isinstance(pattern, str):
            raise OptionError(f"force pattern {pattern!r} is no text: expected {FORCE.expected}")
        if not all(part.strip() for part in pattern.split(".")):
            raise OptionError(f"force pattern {pattern!r} has an empty part: expected {FORCE.expected}")
        if not isinstance(executor, str) or executor.removesuffix("?") not in names():
            raise OptionError.unknown(f"executor of force pattern {pattern!r}:", executor, names())
    return dict(entries)


def _parse_never(text: str) -> object:
    raise ValueError("one variable per cost constant")


BOOL = Kind("true or false (in the environment: 1, 0, true, false, yes, no, on, off)", _parse_bool, _check_bool)
TEXT = Kind("a name", str, _check_text)
PATH = Kind("a path", str, _check_path)
COUNT = Kind("an integer, 0 or more", int, _at_least(0))
POSITIVE = Kind("an integer, 1 or more", int, _at_least(1))
EXECUTORS = Kind("names, comma separated or as a list,", str, _check_executors)
COST = Kind("a finite number, 0 or more", float, _check_cost)
SECONDS = Kind("a finite number of seconds, 0 or more", float, _check_cost)
FORCE = Kind(
    "module-path patterns with an executor each, as a dict or as `pattern=executor` comma separated; an executor with `?` "
    "behind it may fall back",
    _parse_force,
    _check_force,
)
COSTS = Kind("a dict from cost constants to finite numbers, 0 or more", _parse_never, _check_costs)

OPTIONS: tuple[Option, ...] = (
    Option(
        "strict",
        False,
        BOOL,
        "DYNAFUSE_STRICT",
        "raise when a region fails to lower or compile, a stage fails, an executor is not there or a `force` pattern "
        "matches nothing, instead of going on with a warning",
    ),
    Option(
        "device",
        None,
        TEXT,
        "DYNAFUSE_DEVICE",
        "plan for a described device, such as `h200`, instead of the one at hand",
    ),
    Option(
        "executors",
        None,
        EXECUTORS,
        "DYNAFUSE_EXECUTORS",
        "executors that the plan may use besides eager; None: triton for CUDA tensors, inductor for CPU tensors, "
        "or triton with TRITON_INTERPRET=1",
        choices=names,
    ),
    Option(
        "round_like_eager",
        False,
        BOOL,
        "DYNAFUSE_ROUND_LIKE_EAGER",
        "round 16-bit values after every op as eager does, instead of only where they are stored",
        in_key=True,
    ),
    Option(
        "fallback_random",
        False,
        BOOL,
        "DYNAFUSE_FALLBACK_RANDOM",
        "draw random numbers with eager's own ops, bit for bit",
        in_key=True,
    ),
    Option(
        "check_indices",
        True,
        BOOL,
        "DYNAFUSE_CHECK_INDICES",
        "check in kernels that an index which is loaded is in range, unless that is certain, and stop the program if not; "
        "eager does so",
        in_key=True,
    ),
    Option(
        "workers",
        None,
        COUNT,
        "DYNAFUSE_WORKERS",
        "compile worker processes; None: by the number of cores, 0: compile in this process",
    ),
    Option(
        "repro_dir",
        None,
        PATH,
        "DYNAFUSE_REPRO_DIR",
        "where repro files of failed regions and graphs go; None: a temporary directory",
    ),
    Option(
        "trace",
        None,
        PATH,
        "DYNAFUSE_TRACE",
        "folder for the value of every stage of every graph, a text file each; None: none",
    ),
    Option(
        "recompute",
        True,
        BOOL,
        "DYNAFUSE_RECOMPUTE",
        "let several regions recompute a cheap value rather than store and load it",
    ),
    Option(
        "rematerialize",
        "min_cut",
        TEXT,
        "DYNAFUSE_REMATERIALIZE",
        "who says what the backward computes again: min_cut, torch's partitioner, or cost, the cost model",
        choices=("min_cut", "cost"),
    ),
    Option(
        "pad_products",
        True,
        BOOL,
        "DYNAFUSE_PAD_PRODUCTS",
        "run matrix products whose rows are no multiple of 16 bytes in padded sizes, where that is predicted to be faster",
    ),
    Option(
        "join_products",
        True,
        BOOL,
        "DYNAFUSE_JOIN_PRODUCTS",
        "run matrix products that a model writes out, as a multiplication of what is spread and a sum, by the library, "
        "where that is predicted to be faster",
    ),
    Option(
        "join_attention",
        True,
        BOOL,
        "DYNAFUSE_JOIN_ATTENTION",
        "run attention in 16-bit floats that a model writes out, as products and a softmax, by torch's attention, where "
        "that is predicted to be faster",
    ),
    Option(
        "reuse_buffers",
        True,
        BOOL,
        "DYNAFUSE_REUSE_BUFFERS",
        "let kernels write results over operands that nothing reads any more, instead of into new memory; in a backward "
        "without `retain_graph` over saved tensors, too",
    ),
    Option(
        "max_region_ops",
        200,
        POSITIVE,
        "DYNAFUSE_MAX_REGION_OPS",
        "most ops in one region",
    ),
    Option(
        "reuse_layers",
        "auto",
        TEXT,
        "DYNAFUSE_REUSE_LAYERS",
        "whether layers that stand in a graph many times are traced and compiled once: auto, where that hardly costs a "
        "step anything, always, or never",
        choices=("auto", "always", "never"),
    ),
    Option(
        "cudagraphs",
        False,
        BOOL,
        "DYNAFUSE_CUDAGRAPHS",
        'capture and replay CUDA graphs; `mode="reduce-overhead"` and `"max-autotune"` turn it on',
    ),
    Option(
        "capture",
        "auto",
        TEXT,
        "DYNAFUSE_CAPTURE",
        "whether graphs are replayed as CUDA graphs that copy what leaves them, so that nothing is overwritten: auto, those "
        "that the host bounds, always, all that can be, or never; `cudagraphs` has torch's trees do it instead",
        choices=("auto", "always", "never"),
    ),
    Option(
        "force",
        {},
        FORCE,
        "DYNAFUSE_FORCE",
        "force executors onto modules and all inside them; `*` stands for one name of a path, `**` for any number",
    ),
    Option(
        "tune",
        "unsure",
        TEXT,
        "DYNAFUSE_TUNE",
        "when to measure which executor is fastest: never, where predictions are closer than their error, or always; "
        "`always`, which `mode=\"max-autotune\"` stands for, also measures pointwise kernels under several schedules",
        choices=("never", "unsure", "always"),
    ),
    Option(
        "tune_budget_s",
        20.0,
        SECONDS,
        "DYNAFUSE_TUNE_BUDGET_S",
        "most seconds that one graph may spend on such measurements",
    ),
    Option(
        "near_match",
        True,
        BOOL,
        "DYNAFUSE_NEAR_MATCH",
        "let folds of several lengths run on one kernel where compiling less is worth more than the kernel loses",
    ),
    Option(
        "size_classes",
        False,
        BOOL,
        "DYNAFUSE_SIZE_CLASSES",
        "let one Triton kernel serve a class of sizes of an outermost dimension, such as the batch, instead of one size",
    ),
    Option(
        "specialize_after",
        3,
        COUNT,
        "DYNAFUSE_SPECIALIZE_AFTER",
        "how many calls with the same sizes follow each other until a graph with dynamic sizes is compiled once more for "
        "these alone, at most four times; 0: never",
    ),
    Option(
        "interim_plan",
        False,
        BOOL,
        "DYNAFUSE_INTERIM_PLAN",
        "while a kernel is compiled, run its region on kernels that are there and the few ops that they lack eager",
        formerly="stand_ins",
    ),
    Option(
        "cache",
        True,
        BOOL,
        "DYNAFUSE_CACHE",
        "keep compiled kernels and measurements on disk, for this and other processes",
    ),
    Option(
        "cache_size_mb",
        1024,
        COUNT,
        "DYNAFUSE_CACHE_SIZE_MB",
        "most megabytes that they may take; the least recently used go first",
    ),
    Option(
        "cost",
        {},
        COSTS,
        "DYNAFUSE_COST_<NAME>",
        "override constants of the cost model, one variable or dict entry each",
    ),
)
_BY_NAME: Mapping[str, Option] = {
    **{option.formerly: option for option in OPTIONS if option.formerly}, **{option.name: option for option in OPTIONS}}
_BY_ENV: Mapping[str, Option] = {
    **{PREFIX + option.formerly.upper(): option for option in OPTIONS if option.formerly},
    **{option.env: option for option in OPTIONS if option.name != "cost"}}


@dataclass(frozen=True)
class Config:
    """The resolved options, one attribute per row of `OPTIONS`."""

    strict: bool
    device: str | None
    executors: tuple[str, ...] | None
    round_like_eager: bool
    fallback_random: bool
    check_indices: bool
    workers: int | None
    repro_dir: Path | None
    trace: Path | None
    recompute: bool
    rematerialize: str
    pad_products: bool
    join_products: bool
    join_attention: bool
    reuse_buffers: bool
    max_region_ops: int
    reuse_layers: str
    cudagraphs: bool
    capture: str
    force: Mapping[str, str] = field(hash=False)
    tune: str
    tune_budget_s: float
    near_match: bool
    size_classes: bool
    specialize_after: int
    interim_plan: bool
    cache: bool
    cache_size_mb: int
    cost: Mapping[str, float] = field(hash=False)

    def key(self) -> tuple[tuple[str, object], ...]:
        """Name and value of the options that change generated code, as declared: part of every kernel's key."""
        return tuple((option.name, getattr(self, option.name)) for option in OPTIONS if option.in_key)


def register_cost_constants(docs: Mapping[str, str]) -> None:
    """Declare constants of the cost model, name to meaning, as valid for `cost` and `DYNAFUSE_COST_<NAME>`.

    The cost model calls this when it is imported: this module is a leaf and cannot ask. Repeating a name is harmless.
    """
    _cost_constants.update(docs)


def resolve(
    mode: str | None = None,
    options: Mapping[str, object] | None = None,
    environ: Mapping[str, str] = os.environ,
) -> Config:
    """Return the options in force: `options` over the environment over `mode` over the defaults.

    Args:
        mode: A name of `MODES`; None for the default mode.
        options: Values by the names of options, older names included; None for none. `cost` and `force` are merged, name by
            name, with what the environment says.
        environ: The environment. Only `DYNAFUSE_` variables count, and an empty one counts as not set.

    Raises:
        OptionError: A mode, an option or a `DYNAFUSE_` variable is unknown, or a value has a wrong type or range.
    """
    from_mode = _values_of_mode(mode)
    from_environment = _values_of_environment(environ)
    from_options = _values_of_options({} if options is None else options)
    values: dict[str, Any] = {option.name: option.default for option in OPTIONS}
    values |= from_mode | from_environment | from_options
    values["cost"] = _values_of_costs(environ) | from_options.get("cost", {})
    values["force"] = from_environment.get("force", {}) | from_options.get("force", {})
    return Config(**values)


def describe() -> str:
    """Return all options and environment variables as a Markdown table."""
    head = ["| option | environment | default | values | in key | meaning |", "|---|---|---|---|---|---|"]
    rows = [_row(option) for option in OPTIONS]
    rows += [f"| | `{name}` | | | | {doc} |" for name, doc in RESERVED.items()]
    return "\n".join(head + rows)


def _row(option: Option) -> str:
    in_key = "yes" if option.in_key else ""
    default = ",".join(option.default) if isinstance(option.default, tuple) else repr(option.default)
    return f"| `{option.name}` | `{option.env}` | `{default}` | {option.expected} | {in_key} | {option.doc} |"


def _values_of_mode(mode: str | None) -> dict[str, Any]:
    if mode is None:
        return {}
    if not isinstance(mode, str) or mode not in MODES:
        raise OptionError.unknown("mode", mode, MODES)
    return dict(MODES[mode])


def _values_of_options(options: Mapping[str, object]) -> dict[str, Any]:
    if not isinstance(options, Mapping):
        raise OptionError.ill_typed("options", options, "a dict from option names to values")
    for name in options:
        if name not in _BY_NAME:
            raise OptionError.unknown("option", name, _BY_NAME)
    return {_BY_NAME[name].name: _BY_NAME[name].from_value(value) for name, value in options.items()}


def _values_of_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    ours = [name for name in environ if name.startswith(PREFIX) and not name.startswith(COST_PREFIX)]
    for name in ours:
        if name not in _BY_ENV and name not in RESERVED:
            raise OptionError.unknown("environment variable", name, [*_BY_ENV, *RESERVED, "DYNAFUSE_COST_<NAME>"])
    set_here = [name for name in ours if name in _BY_ENV and environ[name]]
    return {_BY_ENV[name].name: _BY_ENV[name].from_text(environ[name]) for name in set_here}


def _values_of_costs(environ: Mapping[str, str]) -> dict[str, float]:
    by_variable = {COST_PREFIX + name.upper(): name for name in _cost_constants}
    values = {}
    for variable in environ:
        if not variable.startswith(COST_PREFIX):
            continue
        if variable not in by_variable:
            raise OptionError.unknown("environment variable", variable, by_variable)
        if environ[variable]:
            values[by_variable[variable]] = _cost_from_text(variable, environ[variable])
    return values


def _cost_from_text(variable: str, text: str) -> float:
    try:
        return _check_cost(float(text))
    except ValueError:
        raise OptionError.ill_typed(f"environment variable {variable}", text, COST.expected) from None


def _known_cost(name: object) -> str:
    if not isinstance(name, str) or name not in _cost_constants:
        raise OptionError.unknown("cost constant", name, _cost_constants)
    return name
