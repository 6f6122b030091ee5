"""The methods of VeloxQuant-MLX as functions from (k, v), [H, S, D] in f16, to what its caches give back."""

import contextlib
import dataclasses
import importlib.metadata

import mlx.core as mx
import numpy as np
from veloxquant_mlx import KVCacheConfig, KVCacheFactory
from veloxquant_mlx.quantizers import KIVIQuantizer, RaBitQQuantizer
from veloxquant_mlx.quantizers._quant_utils import _group_quant_dequant_batched
from veloxquant_mlx.quantizers.svdq import latent_group_slices


@dataclasses.dataclass
class Result:
    k: np.ndarray  # [H, S, D] f32
    v: np.ndarray
    rank_k: int = 0  # channels that get bits, the most of any head; 0 = the method has no basis
    rank_v: int = 0


def version():
    return "VeloxQuant-MLX " + importlib.metadata.version("VeloxQuant-MLX")


def _numpy(x):
    return np.array(x.astype(mx.float32))


def _ranks(cache):
    """The package publishes the rank of keys only, and svdq's with the channels of 0 bits, as a mean over heads."""
    if hasattr(cache, "_keys_lr"):
        return cache._keys_lr.stored_rank, cache._vals_lr.stored_rank
    kept = 0
    for rank, schedule in zip(getattr(cache, "_r", []), getattr(cache, "_effective_schedule", [])):
        runs = latent_group_slices(rank, len(schedule))
        kept = max(kept, sum(end - begin for (begin, end), bits in zip(runs, schedule) if bits > 0))
    return kept, 0


def cache(method, streamed=0, **options):
    """A cache of the package. The last `streamed` tokens come one by one, the others before them in one call."""

    def run(k, v):
        tokens = k.shape[1]
        made = KVCacheFactory.create(KVCacheConfig(method=method, head_dim=k.shape[2], **options))
        at_once = tokens - streamed
        steps = [(0, at_once), *((t, t + 1) for t in range(at_once, tokens))]
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


def rabitq(unbiased):
    """The package has RaBitQ as a quantiser of keys, not as a cache. One centroid per head: its mean, as ours.

    Its decoder gives a key the length of least error, |k| times the cosine with its signs. `unbiased` gives it |k| over
    that cosine, the paper's estimate of inner products.
    """

    def one_head(k):
        quantizer = RaBitQQuantizer(d=k.shape[1], nlist=1)
        with contextlib.redirect_stdout(None):  # it reports on its k-means
            quantizer.fit(mx.array(k), max_samples=len(k))
        decoded = _numpy(quantizer.decode(quantizer.encode(mx.array(k))))
        if not unbiased:
            return decoded
        exact = k.astype(np.float32)
        mean = exact.mean(axis=0)
        square = np.square(exact - mean).sum(axis=1, keepdims=True)
        return mean + (decoded - mean) * square / np.square(decoded - mean).sum(axis=1, keepdims=True)

    def run(k, v):
        return Result(np.stack([one_head(head) for head in k]), v.astype(np.float32))

    return run


def per_token(bits, group_size=32):
    """KIVI's quantiser of values alone: per token and 32 channels."""

    def run(k, v):
        quantizer = KIVIQuantizer(d=v.shape[2], b=bits, group_size=group_size, axis="token")
        decoded = [_numpy(quantizer.decode(quantizer.encode(mx.array(head)))) for head in v]
        return Result(k.astype(np.float32), np.stack(decoded))

    return run
