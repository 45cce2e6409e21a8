"""Which adapter serves the installed vLLM."""

import re
from importlib.util import find_spec
from pathlib import Path

from vllm_moe_modular.errors import IncompatibleVllmError
from vllm_moe_modular.vllm_adapter.compatibility import ERAS, Era
from vllm_moe_modular.vllm_adapter.contract import drift

_VERSION = re.compile(r"""^__version__\s*=.*?['"](\d+)\.(\d+)\.(\d+)""", re.MULTILINE)


def vllm_root() -> Path:
    """The folder of the installed vLLM package, found without importing it.

    Raises:
        IncompatibleVllmError: there is none.
    """
    spec = find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        raise IncompatibleVllmError("vllm is not installed in this environment; pip install vllm next to this package")
    return Path(next(iter(spec.submodule_search_locations)))


def vllm_version(root: Path) -> tuple[int, int, int]:
    """The release under `root`, from the file that vLLM's build writes: distributions of other names ship it too.

    Raises:
        IncompatibleVllmError: the file is missing or holds no version.
    """
    file = root / "_version.py"
    found = _VERSION.search(file.read_text(encoding="utf-8")) if file.is_file() else None
    if found is None:
        raise IncompatibleVllmError(f"{file} holds no version; reinstall vllm from a wheel")
    major, minor, micro = map(int, found.groups())
    return major, minor, micro


def find_era(root: Path) -> Era:
    """The adapter for the vLLM under `root`.

    Raises:
        IncompatibleVllmError: the release is outside the tested ranges, or inside with drifted interfaces, which are
            named.
    """
    version = vllm_version(root)
    name = ".".join(map(str, version))
    era = next((e for e in ERAS if e.covers(version)), None)
    if era is None:
        tested = ", ".join(map(str, ERAS))
        raise IncompatibleVllmError(f"vLLM {name} is outside the tested releases ({tested}); install one of those")
    if differences := drift(era.relies_on, root):
        raise IncompatibleVllmError(
            f"vLLM {name} is not the one that was tested: {'; '.join(differences)}; install an unmodified release"
        )
    return era
