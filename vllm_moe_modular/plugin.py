"""The entry point that vLLM calls in every process, possibly more than once. Off, it patches nothing."""

import os

from vllm_moe_modular import settings as settings_module


def register() -> None:
    """Called by vLLM (entry-point group `vllm.general_plugins`).

    Raises:
        SettingsError: the plugin is on and a variable of ours has an unknown name or value.
    """
    _make_known([v.name for v in settings_module.VARIABLES if v.name in os.environ])
    if os.environ.get(settings_module.PREFIX, "0").lower() in ("0", "false", ""):
        return
    settings = settings_module.from_environment(os.environ)

    from vllm_moe_modular.vllm_adapter.install import install

    install(settings)


def _make_known(names: list[str]) -> None:
    """Tell vLLM that these variables are ours.

    It then neither warns of them nor stops under --fail-on-environ-validation, and hashes them: that gives compile
    caches made with the plugin another identity than those made without. A name that is not ours stays unknown to it.
    """
    if not names:
        return
    from vllm import envs

    variables = getattr(envs, "environment_variables", None)
    if variables is None:
        return
    for name in names:
        variables.setdefault(name, lambda name=name: os.environ.get(name))
