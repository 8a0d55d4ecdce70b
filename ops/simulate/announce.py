"""What a simulated replica announces of itself."""

from __future__ import annotations

from actors.messages import Announcement, Fingerprint, Role

LAYOUT = {
    "num_layers": 2,
    "page_tokens": 32,
    "num_kv_heads": 1,
    "head_dim": 64,
    "order": "cpu_vec",
    "rounding": "nearest_even",
    "k_scales": [1.0],
    "v_scales": [1.0],
}


def announcement(
    replica_id: str,
    role: Role,
    node_id: str,
    blocks_total: int,
    *,
    incarnation: int = 1,
    block_tokens: int = 32,
    generation: str = "",
    tickets: tuple[int, ...] = (),
    max_seqs: int = 0,
) -> Announcement:
    dtype = "bfloat16" if role is Role.PREFILL else "float8_e4m3fn"
    return Announcement(
        replica_id=replica_id,
        role=role,
        node_id=node_id,
        incarnation=incarnation,
        fingerprint=Fingerprint(geometry={"layers": 2}, tokenizer="simulated"),
        layout=LAYOUT | {"dtype": dtype},
        block_tokens=block_tokens,
        blocks_total=blocks_total,
        max_model_len=1 << 20,
        max_num_seqs=max_seqs,
        tickets=tickets,
        generation=generation,
    )
