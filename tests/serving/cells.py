"""The serving table: which model families are served how, and which cells a short run takes.

A short run takes the parts and the families that differ most, on one, two and four ranks, one of them compiled;
`./dev test --all` takes every cell. Two servers run side by side, but never two of this table.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

SETTINGS_ON = {"VLLM_MOE_MODULAR": "1", "VLLM_MOE_MODULAR_STRICT": "1"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Mode:
    """How many ranks of which kind, and what the user asks of the plugin.

    Attributes:
        parts: what each layer has to run on, as the log says it.
    """

    args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    parts: str


LATENT_ATTENTION = ("--attention-backend", "CPU_MLA")  # what vLLM takes on processors with AMX has no float32
DEEPSEEK_EAGER = ("-cc", '{"custom_ops":["all","-rotary_embedding"]}')  # its CPU rotary operation is wrong for DeepSeek
NAMED_LOCAL = {"VLLM_MOE_MODULAR_ALL2ALL": "local", "VLLM_MOE_MODULAR_EXPERTS": "torch"}
EP = "--enable-expert-parallel"
DP2 = ("-dp", "2", "--api-server-count", "1")  # one front end: each process takes seconds to start
MODES = {
    "single": Mode(env=NAMED_LOCAL, parts="local + torch"),
    "tp2": Mode(args=("-tp", "2"), env=NAMED_LOCAL, parts="local + torch"),
    "tp2-ep-auto": Mode(args=("-tp", "2", EP), parts="local + torch"),
    "tp2-ep-named": Mode(args=("-tp", "2", EP), env={"VLLM_MOE_MODULAR_ALL2ALL": "torch"}, parts="torch + torch"),
    "dp2-ep": Mode(args=(*DP2, EP), parts="torch + torch"),
    "dp2-ep-allgather": Mode(args=(*DP2, EP), env={"VLLM_MOE_MODULAR_ALL2ALL": "allgather"}, parts="allgather + torch"),
    "dp2-ep-allgather-vllm": Mode(
        args=(*DP2, EP),
        env={"VLLM_MOE_MODULAR_ALL2ALL": "allgather", "VLLM_MOE_MODULAR_EXPERTS": "vllm"},
        parts="allgather + vllm",
    ),
    "tp2-ep-vllm": Mode(args=("-tp", "2", EP), env={"VLLM_MOE_MODULAR_EXPERTS": "vllm"}, parts="local + vllm"),
    "dp2-tp2-ep": Mode(args=(*DP2, "-tp", "2", EP), parts="torch + torch"),
}


@dataclass(frozen=True, slots=True)
class Cell:
    """One server: a family in a mode, eager or compiled."""

    family: str
    mode: str
    compiled: bool = False

    def __str__(self) -> str:
        return f"{self.family}-{self.mode}-{'compiled' if self.compiled else 'eager'}"

    @property
    def args(self) -> tuple[str, ...]:
        """Arguments of `vllm serve`."""
        args = (*MODES[self.mode].args, *(LATENT_ATTENTION if "deepseek" in self.family else ()))
        if self.compiled:
            return args
        return (*args, "--enforce-eager", *(DEEPSEEK_EAGER if "deepseek" in self.family else ()))


@dataclass(frozen=True, slots=True)
class Table:
    """The cells of one vLLM release."""

    core: tuple[Cell, ...]
    more: tuple[Cell, ...]


_THREE = ("qwen3_moe", "deepseek_v3", "gpt_oss")
# In every run test_cases serves Qwen3-MoE and DeepSeek-V3 with a drafter on two data-parallel ranks, and Qwen3-MoE on
# two tensor-parallel ranks with what auto chooses, all eager.
_CORE = (
    Cell("gpt_oss", "dp2-tp2-ep"),
    Cell("deepseek_v2", "tp2-ep-named", compiled=True),
    Cell("mixtral", "dp2-ep-allgather-vllm"),
    Cell("qwen2_moe", "tp2"),
    Cell("olmoe", "single"),
)
_ALL_0_32 = [
    *(
        Cell(family, mode, compiled)
        for family in _THREE
        for mode in ("single", "tp2-ep-auto", "tp2-ep-named", "dp2-ep", "dp2-tp2-ep")
        for compiled in (False, True)
    ),
    *(
        Cell(family, mode)
        for family in ("mixtral", "deepseek_v2", "qwen2_moe", "olmoe")
        for mode in ("dp2-ep", "tp2-ep-auto")
    ),
    Cell("mixtral", "dp2-ep-allgather"),
    *(Cell(family, "dp2-ep-allgather-vllm") for family in ("qwen3_moe", "qwen2_moe", "deepseek_v3", "gpt_oss")),
    Cell("qwen3_moe", "tp2-ep-vllm", compiled=True),
    Cell("deepseek_v2", "tp2-ep-named"),
    Cell("deepseek_v2", "dp2-ep", compiled=True),
    Cell("qwen2_moe", "tp2-ep-named", compiled=True),
    Cell("qwen2_moe", "dp2-ep", compiled=True),
    Cell("olmoe", "single", compiled=True),
    Cell("qwen2_moe", "dp2-tp2-ep", compiled=True),
    Cell("deepseek_v2", "dp2-ep-allgather"),
    Cell("olmoe", "tp2"),
]  # fmt: skip

_CORE_0_11 = (Cell("qwen2_moe", "dp2-tp2-ep"),)
_ALL_0_11 = [
    Cell(family, mode)
    for family in ("qwen3_moe", "mixtral", "qwen2_moe", "glm4_moe")
    for mode in ("single", "tp2", "tp2-ep-auto", "tp2-ep-named", "dp2-ep", "dp2-tp2-ep")
]

TABLES = {
    (0, 32): Table(_CORE, tuple(c for c in _ALL_0_32 if c not in _CORE)),
    (0, 11): Table(_CORE_0_11, tuple(c for c in _ALL_0_11 if c not in _CORE_0_11)),
}
