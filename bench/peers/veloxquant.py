"""The methods of VeloxQuant-MLX as functions from (k, v), [H, S, D] in f16, to what its caches give back."""

import dataclasses
import importlib.metadata

import mlx.core as mx
import numpy as np
from veloxquant_mlx import KVCacheConfig, KVCacheFactory
from veloxquant_mlx.quantizers import RaBitQQuantizer
from veloxquant_mlx.quantizers._quant_utils import _group_quant_dequant_batched


@dataclasses.dataclass
class Result:
    k: np.ndarray  # [H, S, D] f32
    v: np.ndarray
    rank_k: int = 0  # 0 = the method has none; the largest of the heads
    rank_v: int = 0


def version():
    return "VeloxQuant-MLX " + importlib.metadata.version("VeloxQuant-MLX")


def _numpy(x):
    return np.array(x.astype(mx.float32))


def _ranks(cache):
    """The package publishes the rank of keys only, and for svdq its mean over heads."""
    if hasattr(cache, "_keys_lr"):
        return cache._keys_lr.stored_rank, cache._vals_lr.stored_rank
    return max(getattr(cache, "_r", [0])), 0


def cache(method, first=0, **options):
    """A cache of the package. `first` tokens in the first call, the others one by one; 0 = all, negative: from the end."""

    def run(k, v):
        tokens = k.shape[1]
        made = KVCacheFactory.create(KVCacheConfig(method=method, head_dim=k.shape[2], **options))
        split = first if first > 0 else tokens + first
        steps = [(0, split), *((t, t + 1) for t in range(split, tokens))]
        for begin, end in steps:
            k_out, v_out = made.update_and_fetch(mx.array(k[None, :, begin:end]), mx.array(v[None, :, begin:end]))
            mx.eval(k_out, v_out)
        return Result(_numpy(k_out)[0], _numpy(v_out)[0], *_ranks(made))

    return run


def uniform(bits, group_size=32):
    """No cache of the package is this plain; its shared quantiser is, per channel and 32 tokens."""

    def run(k, v):
        return Result(*(_numpy(_group_quant_dequant_batched(mx.array(x), bits, group_size)) for x in (k, v)))

    return run


def rabitq():
    """The package has RaBitQ as a quantiser of keys, not as a cache. One centroid per head: its mean, as ours."""

    def one_head(k):
        quantizer = RaBitQQuantizer(d=k.shape[1], nlist=1)
        quantizer.fit(mx.array(k), max_samples=len(k))
        return _numpy(quantizer.decode(quantizer.encode(mx.array(k))))

    def run(k, v):
        return Result(np.stack([one_head(head) for head in k]), v.astype(np.float32))

    return run
