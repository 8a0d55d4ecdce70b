"""Which modules become INT4 and which stay as they are, by module kind, with a default per model family.

A kind is decided by the module's name alone, first match wins. Whatever matches no packable kind is kept: an
unknown projection costs bytes, a quantised router costs the model.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

KINDS: dict[str, re.Pattern[str]] = {
    kind: re.compile(pattern)
    for kind, pattern in {
        "vision": r"(^|\.)(vision_tower|vision_model|visual|audio_tower|mm_projector|multi_modal_projector)(\.|$)",
        "mtp_projection": r"(eh_proj|mtp\.fc|shared_head\.head)$",
        "embedding": r"(embed_tokens|wte|word_embeddings)$",
        "lm_head": r"lm_head$",
        "norm": r"norm\w*$",
        "indexer": r"\.indexer\.",
        "router": r"(mlp|block_sparse_moe)\.gate$|shared_expert_gate$|\.router$",
        "attention_latent": r"self_attn\.(q_a_proj|kv_a_proj_with_mqa|kv_b_proj)$",
        "attention": r"self_attn\.(q_proj|k_proj|v_proj|o_proj|q_b_proj|qkv_proj)$",
        "routed_experts": r"experts\.\d+\.(gate_proj|up_proj|down_proj|w1|w2|w3)$",
        "shared_experts": r"shared_experts?\.(gate_proj|up_proj|down_proj)$",
        "mlp": r"mlp\.(gate_proj|up_proj|down_proj|gate_up_proj)$",
    }.items()
}
PACKABLE = ("attention_latent", "attention", "routed_experts", "shared_experts", "mlp")

# Projections that an engine joins into one matrix must share one format; the joined name is listed too, since a
# draft (MTP) model looks its layers up by it.
FUSED = (
    ("fused_qkv_a_proj", ("q_a_proj", "kv_a_proj_with_mqa")),
    ("qkv_proj", ("q_proj", "k_proj", "v_proj")),
    ("gate_up_proj", ("gate_proj", "up_proj")),
)


class Family(NamedTuple):
    """`packed`: the kinds that become INT4 unless asked otherwise."""

    name: str
    model_types: tuple[str, ...]
    packed: tuple[str, ...]
    reason: str


FAMILIES = (
    Family(
        "deepseek",
        ("deepseek_v2", "deepseek_v3", "deepseek_v32", "kimi_k2", "kimi_k25", "kimi_k26"),
        ("attention", "routed_experts"),
        "the latent projections (q_a, kv_a, kv_b) make the KV cache's rows, and the first dense layers and shared "
        "experts are read by every token; together they are a few per cent of the bytes",
    ),
    Family(
        "glm",
        ("glm4_moe", "glm4_moe_lite", "glm_moe_dsa"),
        ("attention", "routed_experts"),
        "as for DeepSeek; the sparse indexer also stays, it chooses what attention may see",
    ),
    Family(
        "moe",
        ("qwen2_moe", "qwen3_moe", "mixtral"),
        ("attention", "routed_experts"),
        "experts are nearly all of the bytes; shared experts and dense layers are read by every token",
    ),
    Family(
        "dense",
        ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi3", "glm4", "smollm3"),
        ("attention", "mlp"),
        "every projection of the blocks; embeddings, norms and lm_head stay",
    ),
)
GENERIC = Family(
    "generic",
    (),
    ("attention", "routed_experts", "mlp"),
    "unknown model type: only projections with well-known names are packed",
)


def family_of(model_type: str) -> Family:
    return next((family for family in FAMILIES if model_type in family.model_types), GENERIC)


def kind_of(module: str) -> str:
    """The kind of a module name (without `.weight`), "other" when none fits."""
    return next((kind for kind, pattern in KINDS.items() if pattern.search(module)), "other")


class Choice(NamedTuple):
    """What to pack: kinds, less the modules that `keep_match` finds (regular expressions on module names)."""

    packed: frozenset[str]
    keep_match: tuple[re.Pattern[str], ...]

    def packs(self, module: str) -> bool:
        return kind_of(module) in self.packed and not any(pattern.search(module) for pattern in self.keep_match)


def choose(family: Family, pack: Iterable[str], keep: Iterable[str], keep_match: Iterable[str]) -> Choice:
    """The family's default, with kinds added (`pack`) or taken away (`keep`). ValueError names a bad kind."""
    pack, keep = list(pack), list(keep)
    for option, kinds in (("--pack", pack), ("--keep", keep)):
        for kind in kinds:
            if kind not in PACKABLE:
                known = f"it always stays as it is; choose from: {', '.join(PACKABLE)}"
                raise ValueError(f"{option} {kind}: {known if kind in KINDS else 'no such kind; ' + known}")
    both = sorted(set(pack) & set(keep))
    if both:
        raise ValueError(f"{', '.join(both)} is both in --pack and in --keep")
    try:
        patterns = tuple(re.compile(pattern) for pattern in keep_match)
    except re.error as error:
        raise ValueError(f"--keep-match {error.pattern!r} is not a regular expression: {error}") from error
    return Choice((frozenset(family.packed) | set(pack)) - set(keep), patterns)


def check_fused(packed: dict[str, bool]) -> None:
    """Projections that an engine fuses must all be packed or all be kept. `packed`: module -> choice."""
    for _, parts in FUSED:
        groups: dict[str, dict[str, bool]] = defaultdict(dict)
        for module, choice in packed.items():
            parent, _, leaf = module.rpartition(".")
            if leaf in parts:
                groups[parent][leaf] = choice
        for parent, found in groups.items():
            if len(set(found.values())) > 1:
                kept = ", ".join(leaf for leaf, choice in found.items() if not choice)
                raise ValueError(
                    f"{parent}: {kept} would be kept and its siblings packed, but engines fuse "
                    f"{', '.join(parts)} into one matrix; match all of them with --keep-match or none"
                )


def _template(module: str) -> str:
    """The module's name without its root, layer and expert numbers as `\\d+`, escaped for a regular expression."""
    bare = re.sub(r"^(language_model\.)?(model\.)?(language_model\.)?", "", module)
    return r"\.".join(r"\d+" if part.isdigit() else re.escape(part) for part in bare.split("."))


def _exact(module: str) -> str:
    bare = re.sub(r"^(language_model\.)?(model\.)?(language_model\.)?", "", module)
    return re.escape(bare)


def ignore_patterns(packed: dict[str, bool]) -> list[str]:
    """The `ignore` list of a compressed-tensors config: regular expressions that match exactly the kept modules.

    `packed`: every module with a 2-D weight -> whether it became INT4. Names are folded over layer and expert
    numbers where all of them agree. Roots (`model.`, `language_model.`) are left open, since engines rename them.
    """
    by_template: dict[str, set[bool]] = defaultdict(set)
    for module, choice in packed.items():
        by_template[_template(module)].add(choice)
    patterns: dict[str, None] = {}
    for module, choice in packed.items():
        if choice:
            continue
        folded = _template(module)
        body = folded if by_template[folded] == {False} else _exact(module)
        patterns[f"re:(.*\\.)?{body}$"] = None
        for joined, parts in FUSED:
            leaf = module.rpartition(".")[2]
            if leaf in parts:
                patterns[f"re:(.*\\.)?{body.removesuffix(re.escape(leaf))}{joined}$"] = None
    patterns["re:(.*\\.)?lm_head$"] = None  # absent from the files when tied, yet a Linear in the model
    return sorted(patterns)
