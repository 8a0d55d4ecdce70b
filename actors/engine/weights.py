"""How many bytes of weights an engine loaded.

vLLM's CPU build packs linear layers into the form its matrix library wants and drops the loaded tensors, so counting a
running model's parameters misses most of it. The loader hands the model over once, loaded and not yet packed: that is
where it is counted. vLLM has no hook there; its name in the loader's module is wrapped.
"""

from __future__ import annotations

from typing import Any

import torch

_loaded_bytes = 0


def tensor_bytes(model: torch.nn.Module) -> int:
    """Bytes of all parameters and buffers, shared storage once."""
    seen = {t.data_ptr(): t.numel() * t.element_size() for t in (*model.parameters(), *model.buffers())}
    return sum(seen.values())


def loaded_bytes() -> int:
    """Bytes of parameters as loaded in this process; 0 before a model was loaded here."""
    return _loaded_bytes


def count_at_load() -> None:
    """Wraps the loader's last step in this process. Idempotent."""
    from vllm.model_executor.model_loader import base_loader

    pack = base_loader.process_weights_after_loading
    if getattr(pack, "counts_for_pageferry", False):
        return

    def count_then_pack(model: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        global _loaded_bytes
        _loaded_bytes = sum({p.data_ptr(): p.numel() * p.element_size() for p in model.parameters()}.values())
        return pack(model, *args, **kwargs)

    count_then_pack.counts_for_pageferry = True  # type: ignore[attr-defined]
    base_loader.process_weights_after_loading = count_then_pack
