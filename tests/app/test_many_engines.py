"""What vLLM's frontend assumes of one engine, with two frontends before two decode replicas."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from fake_cluster import FakeCluster, request
from vllm.entrypoints.openai.models.protocol import BaseModelPath
from vllm.entrypoints.openai.models.serving import OpenAIServingModels
from vllm.entrypoints.serve.lora.protocol import LoadLoRAAdapterRequest
from vllm.lora.request import LoRARequest
from vllm.multimodal.cache.factories import engine_receiver_cache_from_config, processor_cache_from_config
from vllm.multimodal.inputs import MultiModalKwargsItem

from app.request.core_client import FerryCoreClient
from app.request.many_engines import for_many_engines, shared_lora


class Frontend:
    """vLLM's own table of adapters over our client."""

    def __init__(self, far: Cluster) -> None:
        self.cluster = far
        self.client = FerryCoreClient("f", far, far, far, block_tokens=4)
        engine = SimpleNamespace(
            model_config=SimpleNamespace(model="m"),
            renderer=None,
            input_processor=None,
            add_lora=self.client.add_lora_async,
        )
        self.models = OpenAIServingModels(engine, [BaseModelPath(name="m", model_path="m")])  # type: ignore[arg-type]

    async def load(self, name: str, path: Path) -> None:
        answer = await self.models.load_lora_adapter(LoadLoRAAdapterRequest(lora_name=name, lora_path=str(path)))
        assert isinstance(answer, str), answer


class Cluster(FakeCluster):
    """Decode replicas that load adapters by number and take one that they know as loaded, as vLLM's do."""

    def __init__(self, loaded: dict[str, dict[int, str]]) -> None:
        super().__init__()
        self.loaded = loaded  # replica -> number -> path

    async def utility(self, method: str, args: list[Any]) -> list[Any]:
        if method == "add_lora":
            for replica in self.loaded.values():
                replica.setdefault(args[0].lora_int_id, args[0].lora_path)
            return [True, True]
        return await super().utility(method, args)

    def weights_of(self, replica_id: str, lora: LoRARequest) -> str:
        return self.loaded[replica_id].setdefault(lora.lora_int_id, lora.lora_path)


def adapter(folder: Path, text: str = "") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text(text)
    return folder


async def test_an_adapter_has_one_number_on_every_frontend(tmp_path: Path) -> None:
    """vLLM numbers adapters in the order in which one process loads them."""
    paths = {name: adapter(tmp_path / name) for name in ("medical", "legal")}
    loaded: dict[str, dict[int, str]] = {"d1": {}, "d2": {}}
    frontends = [Frontend(Cluster(loaded)) for _ in range(2)]
    for frontend, order in zip(frontends, (("medical", "legal"), ("legal", "medical"))):
        for name in order:
            await frontend.load(name, paths[name])
    loaded["d2"].clear()  # it has just been started
    for frontend in frontends:
        decode = frontend.cluster.decodes["d1"]
        for name in paths:
            wanted = msgspec.structs.replace(request(name), lora_request=frontend.models.lora_requests[name])
            await frontend.client.add_request_async(wanted)
            while name not in decode.submitted:
                await asyncio.sleep(0.001)
            lora = decode.submitted[name].lora_request
            assert lora is not None
            for replica in ("d1", "d2"):
                assert frontend.cluster.weights_of(replica, lora) == str(paths[name])
        frontend.client.shutdown()
        await frontend.client.drained(5)


def test_an_adapter_that_has_changed_is_another_one(tmp_path: Path) -> None:
    path = str(adapter(tmp_path / "a", "{}"))
    first = shared_lora(LoRARequest("a", 1, path))
    assert shared_lora(LoRARequest("a", 7, path, load_inplace=True)) == first
    assert shared_lora(LoRARequest("a", 7, path)).lora_int_id == first.lora_int_id
    adapter(tmp_path / "a", "{ }")
    changed = shared_lora(LoRARequest("a", 1, path))
    assert changed.lora_int_id != first.lora_int_id and changed.lora_name != first.lora_name
    hub = shared_lora(LoRARequest("a", 1, "org/adapter"))
    assert 0 < hub.lora_int_id < 1 << 31 and hub == shared_lora(LoRARequest("a", 5, "org/adapter"))


async def test_unloading_and_pinning_name_the_adapter_as_the_engines_know_it(tmp_path: Path) -> None:
    asked: list[tuple[str, Any]] = []

    class Asked(Cluster):
        async def utility(self, method: str, args: list[Any]) -> list[Any]:
            asked.append((method, args))
            return [True]

    frontend = Frontend(Asked({}))
    await frontend.load("a", adapter(tmp_path / "a"))
    number = asked[0][1][0].lora_int_id
    await frontend.client.pin_lora_async(1)
    await frontend.client.remove_lora_async(1)
    assert asked[1:] == [("pin_lora", [number]), ("remove_lora", [number])]


def multi_modal_config() -> Any:
    settings = SimpleNamespace(mm_processor_cache_gb=1, mm_processor_cache_type="lru")
    return SimpleNamespace(
        model_config=SimpleNamespace(supports_multimodal_inputs=True, get_multimodal_config=lambda: settings),
        parallel_config=SimpleNamespace(_api_process_count=1, data_parallel_size=1, data_parallel_external_lb=False),
    )


def test_an_image_is_sent_to_every_replica_that_answers() -> None:
    """Turns of one conversation on d1, d2, d1, d2 over both frontends, in vLLM's own caches."""
    config, engine_config = multi_modal_config(), multi_modal_config()
    for_many_engines(config)
    frontends = [processor_cache_from_config(config) for _ in range(2)]
    engines = [engine_receiver_cache_from_config(engine_config) for _ in range(2)]
    image = MultiModalKwargsItem.dummy()
    for turn in range(8):
        frontend, engine = frontends[turn // 4], engines[turn % 2]
        assert frontend is not None and engine is not None
        sent = None if frontend.is_cached_item("image") else (image, [])
        item, _ = frontend.get_and_update_item(sent, "image")
        assert engine.get_and_update_item(item, "image") is not None


async def test_the_prefix_caches_of_both_pools_are_reset() -> None:
    asked: list[str] = []

    class Pool(FakeCluster):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.name = name

        async def utility(self, method: str, args: list[Any]) -> list[Any]:
            asked.append(f"{self.name} {method}")
            return [True, self.name != "failing"]

    far = FakeCluster()
    client = FerryCoreClient("f", far, Pool("prefill"), Pool("decode"), block_tokens=4)
    assert await client.reset_prefix_cache_async()
    assert sorted(asked) == ["decode reset_prefix_cache", "prefill reset_prefix_cache"]
    client = FerryCoreClient("f", far, Pool("failing"), Pool("decode"), block_tokens=4)
    assert not await client.reset_prefix_cache_async()


@pytest.mark.parametrize("name", ["logits_processors", "logprobs_mode"])
def test_prefill_samples_as_decode_does(name: str) -> None:
    """It draws the first token of most requests."""
    from actors.engine.config import engine_kwargs
    from actors.messages import Role
    from cluster.spec import ClusterSpec, SpecError

    value: Any = ["my.module:Processor"] if name == "logits_processors" else "raw_logits"
    spec = ClusterSpec.load("local-cpu", {f"pools.decode.engine_args.{name}": value})
    for role in Role:
        assert engine_kwargs(spec, role, "r", "s")[name] == value
    with pytest.raises(SpecError, match=f"pools.prefill.engine_args.{name}.*pools.decode.engine_args"):
        ClusterSpec.load("local-cpu", {f"pools.prefill.engine_args.{name}": value})
