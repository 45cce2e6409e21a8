"""Patches as data: what, why, where upstream, when it can go. Applied once, and listed by `doctor`."""

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any

_MARK = "_vllm_moe_modular_patch"


@dataclass(frozen=True, slots=True, kw_only=True)
class Patch:
    """One function of vLLM that is wrapped.

    Attributes:
        target: "package.module:Class.function".
        wrapper: called as wrapper(original, *args, **kwargs) in its place.
        why: the reason, in a sentence.
        upstream: the change in vLLM that would make it unnecessary, or what to look for there.
        remove_when: when it can go.
        adds: there is no such function, it is added; `wrapper` then gets None for the original.
    """

    target: str
    wrapper: Callable[..., Any]
    why: str
    upstream: str
    remove_when: str
    adds: bool = False


def apply_patches(patches: Sequence[Patch]) -> None:
    """Wrap each target; one that is already wrapped is left as it is, so a second call changes nothing."""
    for patch in patches:
        module, _, qualname = patch.target.partition(":")
        owner: Any = importlib.import_module(module)
        *path, name = qualname.split(".")
        for part in path:
            owner = getattr(owner, part)
        original = getattr(owner, name, None) if patch.adds else getattr(owner, name)
        if getattr(original, _MARK, None) != patch.target:
            setattr(owner, name, _wrapped(original, patch))


def _wrapped(original: Callable[..., Any] | None, patch: Patch) -> Callable[..., Any]:
    @wraps(original or patch.wrapper)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        return patch.wrapper(original, *args, **kwargs)

    setattr(replacement, _MARK, patch.target)
    return replacement
