"""The settings a user types, as one frozen object. Imports nothing but the standard library.

The environment is read here and nowhere else; below this module everything is a function of its arguments.
"""

import difflib
import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from vllm_moe_modular.errors import SettingsError
from vllm_moe_modular.version import __version__

PREFIX = "VLLM_MOE_MODULAR"
ADDITIONAL_CONFIG_KEY = "moe_modular"
MAX_TIMEOUT_S = 7 * 24 * 3600.0  # longer ones overflow somewhere below
MAX_LOW_LATENCY_TOKENS = 1024  # DeepEP's low-latency completion counters start at 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What the user asked for; see `VARIABLES` for the meaning and the default of each field."""

    enabled: bool = False
    all2all: str = "auto"
    experts: str = "auto"
    strict: bool = False
    low_latency_tokens: int = 256
    timeout_s: float = 120.0
    trace: str | None = None
    trace_every: int = 64
    skip_layers: tuple[str, ...] = ()
    tuned: str | None = None

    @property
    def digest(self) -> str:
        """Same on two ranks exactly if they were configured alike. The trace folder may differ."""
        fields = asdict(self) | {"trace": None, "version": __version__}
        return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True, kw_only=True)
class Variable:
    """One setting: the name in the environment, the key in the configuration, how it is read, what it means."""

    name: str
    key: str
    parse: Callable[[Any], Any]  # raises ValueError with what it takes
    meaning: str


def _flag(value: Any) -> bool:
    words = {"1": True, "true": True, "0": False, "false": False, "": False}
    if str(value).lower() not in words:
        raise ValueError("takes 0 or 1")
    return words[str(value).lower()]


def _name(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError("takes the name of a part, or auto")
    return value


def _low_latency_tokens(value: Any) -> int:
    if (
        isinstance(value, bool)
        or not str(value).isdecimal()
        or len(str(value)) > 4
        or not 1 <= int(value) <= MAX_LOW_LATENCY_TOKENS
    ):
        raise ValueError(f"takes a whole number from 1 to {MAX_LOW_LATENCY_TOKENS}")
    return int(value)


def _steps(value: Any) -> int:
    if isinstance(value, bool) or not str(value).isdecimal() or len(str(value)) > 9 or int(value) < 1:
        raise ValueError("takes a whole number of steps, 1 or more")
    return int(value)


def _seconds(value: Any) -> float:
    try:
        seconds = 0.0 if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        seconds = 0.0
    if not 0.001 <= seconds <= MAX_TIMEOUT_S:
        raise ValueError(f"takes a number of seconds from 0.001 to {MAX_TIMEOUT_S:.0f}")
    return seconds


def _folder(value: Any) -> str | None:
    if value is not None and not isinstance(value, str):
        raise ValueError("takes a folder")
    if value and not value.strip():
        raise ValueError("takes a folder, not blanks alone")
    return value or None


def _patterns(value: Any) -> tuple[str, ...]:
    given = [value] if isinstance(value, str) else value
    if not isinstance(given, list | tuple) or not all(isinstance(p, str) for p in given):
        raise ValueError("takes layer-name patterns, separated by commas")
    return tuple(p.strip() for part in given for p in part.split(",") if p.strip())


VARIABLES = (
    Variable(name=PREFIX, key="enabled", parse=_flag, meaning="on or off (default 0)"),
    Variable(name=f"{PREFIX}_ALL2ALL", key="all2all", parse=_name, meaning="the all-to-all, by name (default auto)"),
    Variable(name=f"{PREFIX}_EXPERTS", key="experts", parse=_name, meaning="the expert kernel, by name (default auto)"),
    Variable(
        name=f"{PREFIX}_STRICT",
        key="strict",
        parse=_flag,
        meaning="anything short of every MoE layer swapped is a start-up error (default 0)",
    ),
    Variable(
        name=f"{PREFIX}_LOW_LATENCY_TOKENS",
        key="low_latency_tokens",
        parse=_low_latency_tokens,
        meaning=f"tokens per rank and round of the low-latency transports, at most {MAX_LOW_LATENCY_TOKENS} "
        "(default 256)",
    ),
    Variable(
        name=f"{PREFIX}_TIMEOUT_S",
        key="timeout_s",
        parse=_seconds,
        meaning="how many seconds a rank may be missing from a collective of ours (default 120)",
    ),
    Variable(name=f"{PREFIX}_TRACE", key="trace", parse=_folder, meaning="folder for traces (default: none)"),
    Variable(
        name=f"{PREFIX}_TRACE_EVERY",
        key="trace_every",
        parse=_steps,
        meaning="one step in how many is traced (default 64)",
    ),
    Variable(
        name=f"{PREFIX}_SKIP_LAYERS",
        key="skip_layers",
        parse=_patterns,
        meaning="layer-name patterns to leave to vLLM, separated by commas (default: none)",
    ),
    Variable(
        name=f"{PREFIX}_TUNED",
        key="tuned",
        parse=_folder,
        meaning="folder of tuned tables that go before those of the package (default: none)",
    ),
)


def from_environment(environ: Mapping[str, str]) -> Settings:
    """Read the settings from the environment.

    Raises:
        SettingsError: a variable with our prefix is not known, or its value is not one it takes.
    """
    known = {v.name: v for v in VARIABLES}
    given = {name: value for name, value in environ.items() if name.startswith(PREFIX)}
    return replace(Settings(), **_parse(given, known, what="environment variable"))


def with_overrides(settings: Settings, config: Mapping[str, Any]) -> Settings:
    """`settings` with the keys of `--additional-config '{"moe_modular": {...}}'`, which win.

    Raises:
        SettingsError: a key or a value is not known.
    """
    if not isinstance(config, Mapping):
        raise SettingsError(
            f"--additional-config: {ADDITIONAL_CONFIG_KEY} takes an object of settings, got {type(config).__name__}; "
            f"known keys: {', '.join(v.key for v in VARIABLES)}"
        )
    known = {v.key: v for v in VARIABLES}
    return replace(settings, **_parse(config, known, what=f"--additional-config {ADDITIONAL_CONFIG_KEY} key"))


def _parse(given: Mapping[str, Any], known: Mapping[str, Variable], *, what: str) -> dict[str, Any]:
    parsed: dict[str, Any] = {}
    for name, value in given.items():
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1, cutoff=0.75)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise SettingsError(f"{what} {name} is not known{hint} (known: {', '.join(known)})")
        try:
            parsed[known[name].key] = known[name].parse(value)
        except ValueError as error:
            raise SettingsError(f"{what} {name}={value!r}: {error}") from None
    return parsed
