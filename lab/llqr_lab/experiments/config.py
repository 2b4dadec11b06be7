"""What a run is set by: dataclasses that go to TOML and back, and refuse keys that they don't know."""

import dataclasses
import tomllib
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import tomli_w

from llqr_lab.errors import ConfigError, suggestion

Options = dict[str, Any]
"""A `name` and the keyword arguments of what it names."""


@dataclass(frozen=True)
class Base:
    """The optimizer that LLQR wraps, or that is alone."""

    name: Literal["sgdm", "adam", "adamw", "muon", "soap", "shampoo", "singd", "kfac", "adafisher"]
    lr: float
    weight_decay: float = 0.0
    momentum: float = 0.9
    beta2: float = 0.999


@dataclass(frozen=True)
class Schedule:
    """The learning rate over the steps, in units of the base's."""

    name: Literal["constant", "cosine", "inverse-sqrt", "piecewise"] = "constant"
    warmup: int = 0
    """Steps in which the rate rises linearly to the base's."""
    milestones: tuple[float, ...] = ()
    """Of piecewise: the parts of the run after which the rate falls tenfold."""


@dataclass(frozen=True)
class Inner:
    """The solver of LLQR's refits."""

    name: Literal["sgdm", "adam", "cg", "scale-free"] = "sgdm"
    lr: float = 0.005
    momentum: float = 0.9
    clip: float = 0.0
    """The largest norm of a tensor's inner gradient; 0 is none."""
    schedule: Literal["constant", "cosine"] = "constant"
    """Of the inner learning rate over the training; cosine: down to 0 at its end."""


@dataclass(frozen=True)
class Wrapper:
    """The paper's LLQR around the base."""

    structure: Literal["scalar", "diagonal", "kfac", "ekfac", "dense"]
    divergence: Literal["ngd", "reverse-kl", "renyi", "newton", "gauss-newton"] = "ngd"
    reduction: Literal["sum", "mean"] = "sum"
    """Of KL, reverse KL and Rényi over the batch: sum, as the paper's, or mean, as the loss."""
    order: float = 0.5
    """Of the Rényi divergence."""
    intermediate: tuple[str, ...] = ()
    """Modules with a metric of their own: ½ w ‖x - x_k‖² of what each returns is added to the divergence,"""
    intermediate_weight: float = 0.1
    """with this w."""
    every: int = 500
    steps: int = 25
    ema: float = 0.95
    damping: float = 0.0
    warm_start: bool = False
    fresh_batch: bool = False
    """A refit has a batch of its own, for its gradient and its curvature, in place of the step's."""
    chunk_size: int = 0
    """Examples at a time in a refit; 0 is all."""
    segments: tuple[str, ...] = ()
    """Modules, by patterns of their names, that a refit runs again in place of keeping what they compute."""
    max_dim: int = 8192
    """The longest side of a matrix that K-FAC and E-KFAC have a full factor for."""
    solver: Inner = field(default_factory=Inner)


@dataclass(frozen=True)
class Diagnostics:
    """How good the steps are, compared with the exact one (docs/diagnostics.md); nothing of the training depends on it."""

    every: int = 0
    """Steps between looks; 0 is none."""
    damping: float = 0.01
    products: int = 100
    """The most curvature products that an exact step may take."""


@dataclass(frozen=True)
class Config:
    task: str
    model: Options
    data: Options
    base: Base
    batch: int
    """Examples in a batch; for translation, tokens."""
    epochs: float = 0.0
    steps: int = 0
    """The length of the run, in epochs or in steps."""
    evaluate_every: int = 0
    """Steps between evaluations; 0 is an epoch's."""
    record_every: int = 0
    """Steps between records of the training loss alone, which cost nothing; 0 is with the evaluations only."""
    label_smoothing: float = 0.0
    clip_norm: float = 0.0
    """The largest norm of the gradient; 0 is none."""
    schedule: Schedule = field(default_factory=Schedule)
    default_llqr: bool = False
    llqr: Wrapper | None = None
    diagnostics: Diagnostics = field(default_factory=Diagnostics)
    seed: int = 0
    preset: str = ""
    scale: str = ""
    method: str = ""
    changes: tuple[str, ...] = ()
    """Where the settings came from, and what was changed by hand: name=value, as TOML has it."""

    @property
    def label(self) -> str:
        return "+".join((self.method, *self.changes))

    @property
    def settings(self) -> dict[str, Any]:
        return flat(_plain(self))

    def to_toml(self) -> str:
        return tomli_w.dumps(_plain(self))

    def changed(self, changes: Mapping[str, Any]) -> "Config":
        """With settings replaced, by dotted names: {"llqr.every": 100}."""
        table = _plain(self)
        for key in sorted(changes, key=lambda key: not key.endswith("name")):
            place, value = table, changes[key]
            *folders, last = key.split(".")
            for folder in folders:
                place = place.setdefault(folder, {})
                if not isinstance(place, dict):
                    raise ConfigError(f"'{key}': {folder} is a setting, not a group of them")
            if key in OWN_DEFAULTS and place.get(last) != value:  # another one begins with defaults of its own
                alien = {name.split(".")[-1] for name, where, kinds, _ in NEEDED if where == key and value not in kinds}
                for name in place.keys() - (set(OWN_DEFAULTS[key]) - alien):
                    del place[name]
            place[last] = value
        return parsed(table)

    def by_hand(self, changes: Mapping[str, Any]) -> "Config":
        """With settings replaced, and a note of it."""
        for name in ("preset", "scale", "method", "seed", "changes"):
            if name in changes:
                raise ConfigError(f"'{name}' isn't set by --set: it has an option of its own, or none")
        noted = tuple(f"{name}={toml(value)}" for name, value in sorted(changes.items()))
        return self.changed({**changes, "changes": list(noted)})


def read(path: Path) -> Config:
    try:
        return parsed(tomllib.loads(path.read_text(encoding="utf-8")))
    except (ConfigError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        what = ":" if isinstance(error, ConfigError) else " isn't TOML:"
        raise ConfigError(f"'{path}'{what} {error}") from None


def parsed(table: Mapping[str, Any]) -> Config:
    config: Config = _made(Config, table, "")
    _check(config)
    return config


def toml(value: Any) -> str:
    """A value as TOML writes it, on one line."""
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(toml, value))}]"
    return tomli_w.dumps({"x": value}).strip().removeprefix("x = ")


def differences(one: Config, other: Config) -> list[str]:
    """The settings in which two configurations differ, with both values."""
    left, right = one.settings, other.settings
    pairs = {name: (left.get(name, "not set"), right.get(name, "not set")) for name in {**left, **right}}
    return [f"{name}: {one} and {other}" for name, (one, other) in pairs.items() if one != other]


def _plain(config: Config) -> dict[str, Any]:
    """As tables with lists; what is None is left out."""

    def table(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        return {name: list(value) if isinstance(value, tuple) else value for name, value in pairs if value is not None}

    return dataclasses.asdict(config, dict_factory=table)


def flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A table of tables as one, by dotted names."""
    found: dict[str, Any] = {}
    for name, value in table.items():
        found.update(flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {prefix + name: value})
    return found


def _made(kind: type, table: Any, where: str) -> Any:
    """A dataclass from a table, each value checked with the field's type."""
    if not isinstance(table, Mapping):
        raise ConfigError(f"{where or 'the configuration'} should be a group of settings, not {table!r}")
    hints = typing.get_type_hints(kind)
    for name in table:
        if name not in hints:
            raise ConfigError(f"there is no setting '{where}{name}'{suggestion(name, hints)}")
    for each in dataclasses.fields(kind):
        needed = each.default is each.default_factory is dataclasses.MISSING
        if needed and each.name not in table:
            raise ConfigError(f"the setting '{where}{each.name}' is missing")
    return kind(**{name: _value(hints[name], value, where + name) for name, value in table.items()})


def _value(hint: Any, value: Any, where: str) -> Any:
    if isinstance(hint, types.UnionType):
        hint = next(each for each in typing.get_args(hint) if each is not type(None))
    if dataclasses.is_dataclass(hint):
        return _made(typing.cast(type, hint), value, f"{where}.")
    if hint == Options:
        if not isinstance(value, Mapping) or not isinstance(value.get("name"), str):
            raise ConfigError(f"'{where}' should be a group of settings with a name, not {value!r}")
        return dict(value)
    if typing.get_origin(hint) is tuple:
        if not isinstance(value, list | tuple):
            raise ConfigError(f"'{where}' should be a list, not {value!r}")
        return tuple(_value(typing.get_args(hint)[0], each, where) for each in value)
    if typing.get_origin(hint) is Literal:
        known = typing.get_args(hint)
        if value not in known:
            raise ConfigError(f"'{where}' can't be '{value}'{suggestion(value, known)}")
        return value
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if type(value) is not hint:
        raise ConfigError(f"'{where}' should be of type {hint.__name__}, not {value!r}")
    return value


DISTRIBUTIONAL = ("ngd", "reverse-kl", "renyi")
"""Divergences between output distributions."""
POSITIVE = (
    "batch",
    "base.lr",
    "llqr.every",
    "llqr.steps",
    "llqr.solver.lr",
    "llqr.order",
    "llqr.intermediate_weight",
    "llqr.max_dim",
    "diagnostics.products",
)
NEEDED: tuple[tuple[str, str, tuple[str, ...], Any], ...] = (
    ("base.beta2", "base.name", ("adam", "adamw", "muon", "singd"), 0.999),
    ("base.momentum", "base.name", ("sgdm", "adam", "adamw", "singd", "kfac", "adafisher"), 0.9),
    ("schedule.milestones", "schedule.name", ("piecewise",), []),
    ("llqr.reduction", "llqr.divergence", DISTRIBUTIONAL, "sum"),
    ("llqr.order", "llqr.divergence", ("renyi",), 0.5),
    ("llqr.max_dim", "llqr.structure", ("kfac", "ekfac"), 8192),
    ("llqr.solver.lr", "llqr.solver.name", ("sgdm", "adam"), 0.005),
    ("llqr.solver.momentum", "llqr.solver.name", ("sgdm",), 0.9),
    ("llqr.solver.schedule", "llqr.solver.name", ("sgdm", "adam"), "constant"),
    ("llqr.solver.clip", "llqr.solver.name", ("sgdm", "adam"), 0.0),
)
"""Settings that mean something with some choices only: what has no effect isn't accepted in silence."""
OWN_DEFAULTS: dict[str, tuple[str, ...]] = {"llqr.solver.name": ("clip",), "base.name": ("lr", "weight_decay")}
"""What is said of one solver or optimizer isn't meant for another, but for these, where it takes them."""
FRACTIONS = ("label_smoothing", "base.momentum", "base.beta2", "llqr.ema", "llqr.solver.momentum")


def _check(config: Config) -> None:
    """What types don't say."""
    settings = flat(_plain(config))
    for name, value in settings.items():
        if isinstance(value, int | float) and not abs(value) < 1e30:  # what float32 can work with
            raise ConfigError(f"'{name}' should be a number below 1e30, not {value}")
        if isinstance(value, int | float) and not name.startswith(("model.", "data.")) and value < 0:
            raise ConfigError(f"'{name}' can't be negative, and is {value}")
        if name in POSITIVE and not value > 0:
            raise ConfigError(f"'{name}' should be positive, and is {value}")
        if name in FRACTIONS and not 0 <= value < 1:
            raise ConfigError(f"'{name}' should be at least 0 and below 1, and is {value}")
    if config.llqr and not config.llqr.intermediate and config.llqr.intermediate_weight != 0.1:
        raise ConfigError("'llqr.intermediate_weight' has no effect without 'llqr.intermediate': name modules there")
    if config.default_llqr and config.llqr is not None:
        raise ConfigError("'llqr' is the paper's, and 'default_llqr' takes no settings: leave out one of them")
    if (config.epochs > 0) == (config.steps > 0):
        raise ConfigError("the length of the run should be set by one of 'epochs' and 'steps'")
    for name, where, kinds, default in NEEDED:
        if name in settings and settings[name] != default and settings.get(where) not in kinds:
            raise ConfigError(f"'{name}' has no effect where '{where}' is '{settings.get(where)}': leave it out")
    if config.schedule.name == "inverse-sqrt" and not config.schedule.warmup:
        raise ConfigError("'schedule.warmup' should be positive: the inverse square root is of steps in units of it")
