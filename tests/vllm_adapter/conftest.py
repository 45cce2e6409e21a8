from vllm_moe_modular.errors import IncompatibleVllmError
from vllm_moe_modular.vllm_adapter.detect import find_era, vllm_root

try:
    installed = find_era(vllm_root()).module
except IncompatibleVllmError:
    installed = "none"
if installed != "era_0_28":
    collect_ignore = ["test_era_0_28.py", "test_graphs.py", "test_vllm_experts.py"]  # real classes of those releases
