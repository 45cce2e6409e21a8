"""What `register()` does when the plugin is on."""

import logging

from vllm_moe_modular.errors import IncompatibleVllmError
from vllm_moe_modular.settings import Settings
from vllm_moe_modular.vllm_adapter.detect import find_era, vllm_root
from vllm_moe_modular.vllm_adapter.patches import apply_patches

logger = logging.getLogger("vllm.moe_modular")

_installed = False


def install(settings: Settings) -> None:
    """Patch vLLM for `settings`; a second call in the same process changes nothing.

    Raises:
        IncompatibleVllmError: strict mode, and this vLLM is not one that was tested; without strict mode vLLM is left
            as it is, with a warning that says why.
    """
    global _installed
    if _installed:
        return
    try:
        era = find_era(vllm_root())
    except IncompatibleVllmError as error:
        if settings.strict:
            raise
        logger.warning("moe_modular: stands aside, all layers stay with vLLM: %s", error)
        return
    adapter = era.load().Adapter(settings)
    apply_patches(adapter.patches)
    _installed = True
