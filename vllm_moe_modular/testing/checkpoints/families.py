"""The model families, as data. A new family is one entry; nothing else names one.

Letters as everywhere: H hidden, F expert intermediate, K top-k, G global experts.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from vllm_moe_modular.errors import MoEModularError

HEAD_DIM = 32  # the smallest that every vLLM attention backend takes


class CheckpointError(MoEModularError, ValueError):
    """A checkpoint that cannot be made as asked; the message says what to ask for instead."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """What a caller may choose. All are counts; `hidden` and `intermediate` are elements."""

    hidden: int = 64
    intermediate: int = 64
    experts: int = 8
    top_k: int = 2
    layers: int = 2
    vocab: int = 320


@dataclass(frozen=True, slots=True)
class Family:
    """How one model family spells its configuration.

    `keys` maps a field of `Sizes` to the configuration keys that hold it; `config` is passed as it is. `expert` and
    `shared` are the parts of weight names, inside a layer, that mark the routed experts (with `{e}` for the index,
    absent where all experts share a tensor) and the shared expert (None where the family has none).
    """

    model_type: str
    keys: Mapping[str, tuple[str, ...]]
    config: Mapping[str, object] = field(default_factory=lambda: MappingProxyType({}))
    sizes: Sizes = Sizes()
    expert: str = ".mlp.experts.{e}."
    shared: str | None = None
    dense_layers: int = 0  # leading layers without experts
    expert_groups: int = 1
    mtp_layers: int = 0  # multi-token-prediction layers after the last decoder layer

    def config_for(self, sizes: Sizes) -> dict[str, object]:
        """Keyword arguments of the family's `transformers` configuration."""
        chosen: dict[str, object] = {key: getattr(sizes, size) for size, keys in self.keys.items() for key in keys}
        chosen |= {"hidden_size": sizes.hidden, "num_hidden_layers": sizes.layers, "vocab_size": sizes.vocab}
        chosen |= {"num_experts_per_tok": sizes.top_k, "max_position_embeddings": 4096, "tie_word_embeddings": False}
        if "num_attention_heads" not in self.config:
            heads = sizes.hidden // HEAD_DIM
            chosen |= {"num_attention_heads": heads, "num_key_value_heads": heads}
        return chosen | dict(self.config)


_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": HEAD_DIM}
_LATENT_ATTENTION = {
    # 512 and 64: the only latent and rotary widths that vLLM's MLA backends take.
    **{"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": HEAD_DIM, "v_head_dim": HEAD_DIM},
    **{"num_attention_heads": 2, "num_key_value_heads": 2},
}
_DEEPSEEK_KEYS = {"intermediate": ("moe_intermediate_size", "intermediate_size"), "experts": ("n_routed_experts",)}
_DEEPSEEK_V3 = {
    **_LATENT_ATTENTION,
    **{"topk_method": "noaux_tc", "scoring_func": "sigmoid", "norm_topk_prob": True, "routed_scaling_factor": 1.5},
    **{"first_k_dense_replace": 1, "n_shared_experts": 1, "n_group": 2, "topk_group": 1, "q_lora_rank": 64},
}
_GROUPED = Sizes(layers=3)

FAMILIES: Mapping[str, Family] = {
    "qwen3_moe": Family(
        "qwen3_moe",
        keys={"intermediate": ("moe_intermediate_size", "intermediate_size"), "experts": ("num_experts",)},
        config={**_HEADS, "norm_topk_prob": True},
    ),
    "mixtral": Family(
        "mixtral",
        keys={"intermediate": ("intermediate_size",), "experts": ("num_local_experts",)},
        config=_HEADS,
        expert=".block_sparse_moe.experts.{e}.",
    ),
    "qwen2_moe": Family(
        "qwen2_moe",
        keys={
            "intermediate": ("moe_intermediate_size", "intermediate_size", "shared_expert_intermediate_size"),
            "experts": ("num_experts",),
        },
        shared=".mlp.shared_expert.",
    ),
    "olmoe": Family("olmoe", keys={"intermediate": ("intermediate_size",), "experts": ("num_experts",)}),
    "glm4_moe": Family(
        "glm4_moe",
        keys=_DEEPSEEK_KEYS,
        config={
            **_HEADS,
            **{"norm_topk_prob": True, "routed_scaling_factor": 1.5, "use_qk_norm": True, "attention_bias": True},
            **{"first_k_dense_replace": 1, "n_shared_experts": 1, "num_nextn_predict_layers": 0},
        },
        sizes=Sizes(layers=3),
        shared=".mlp.shared_experts.",
        dense_layers=1,
    ),
    "gpt_oss": Family(
        "gpt_oss",
        keys={"intermediate": ("intermediate_size",), "experts": ("num_local_experts",)},
        config={**_HEADS, "head_dim": 64, "max_position_embeddings": 131072},  # 32 times its YaRN base
        expert=".mlp.experts.",
    ),
    "deepseek_v2": Family(
        "deepseek_v2",
        keys=_DEEPSEEK_KEYS,
        config={
            **_LATENT_ATTENTION,
            **{"topk_method": "greedy", "norm_topk_prob": False, "routed_scaling_factor": 1.5, "q_lora_rank": None},
            **{"first_k_dense_replace": 1, "n_shared_experts": 1, "n_group": 1, "topk_group": 1},
        },
        sizes=_GROUPED,
        shared=".mlp.shared_experts.",
        dense_layers=1,
    ),
    "deepseek_v3": Family(
        "deepseek_v3",
        keys=_DEEPSEEK_KEYS,
        config={**_DEEPSEEK_V3, "num_nextn_predict_layers": 0},
        sizes=_GROUPED,
        shared=".mlp.shared_experts.",
        dense_layers=1,
        expert_groups=2,
    ),
    "deepseek_v3_mtp": Family(
        "deepseek_v3",
        keys=_DEEPSEEK_KEYS,
        config={**_DEEPSEEK_V3, "num_nextn_predict_layers": 1},
        sizes=_GROUPED,
        shared=".mlp.shared_experts.",
        dense_layers=1,
        expert_groups=2,
        mtp_layers=1,
    ),
}


def name_objections(what: str, name: str, known: Iterable[str]) -> list[str]:
    """The objection to a name that is not known, with those that are; empty when it is."""
    names = sorted(known)
    return [] if name in names else [f"{what} {name!r} is not known; choose one of {', '.join(names)}"]


def size_objections(name: str, family: Family, sizes: Sizes) -> list[str]:
    """Every objection to `sizes`, each one sentence; empty when family `name` takes them."""
    objections = [
        f"{label} is {value}; it must be at least {least}"
        for label, value, least in (
            ("top_k", sizes.top_k, 1),
            ("experts", sizes.experts, 2),
            ("layers", sizes.layers, family.dense_layers + 1),
            ("vocab", sizes.vocab, 320),
        )
        if value < least
    ]
    for label, value in (("hidden", sizes.hidden), ("intermediate", sizes.intermediate)):
        if value < 64 or value % HEAD_DIM:
            objections.append(f"{label} is {value}; it must be a multiple of {HEAD_DIM}, 64 or more")
    if sizes.experts % family.expert_groups:
        objections.append(f"experts is {sizes.experts}; {name} routes in {family.expert_groups} equal groups")
    selectable = sizes.experts // family.expert_groups
    if sizes.top_k > selectable:
        objections.append(f"top_k is {sizes.top_k}; each token of {name} chooses among {selectable} experts")
    return objections
