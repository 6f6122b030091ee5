"""Bases of keys and values: moments, their average over positions, principal axes in a metric."""
import dataclasses

import torch

from quantisers import CHOICES, half, water_fill


@dataclasses.dataclass
class Group:
    """Heads that share a basis. joint: their dims are stacked; else each head uses it by itself.

    Decoded x = mean + z @ decode with z = (x - mean) @ encode; variance is that of z."""
    heads: list
    joint: bool
    mean: torch.Tensor      # [W, d]
    encode: torch.Tensor    # [W, d, d]
    decode: torch.Tensor    # [W, d, d]
    variance: torch.Tensor  # [W, d]
    bits: torch.Tensor = None  # [W, d]


def mean_phase(angle, n):
    """(1 / n) sum over p < n of exp(i angle p)."""
    h = torch.remainder(angle + torch.pi, 2 * torch.pi) / 2 - torch.pi / 2
    flat = h.abs() < 1e-12
    s = torch.where(flat, torch.ones_like(h), h)
    size = torch.where(flat, torch.ones_like(h), torch.sin(n * s) / (n * torch.sin(s)))
    return torch.polar(size.abs(), (n - 1) * h + torch.pi * (size < 0).double())


def average_over_positions(mean, second, rope, heads, n):
    """Moments of un-rotated rows -> their average over rotations to positions 0..n-1.
    mean [W, d], second [W, d, d], d = heads * D."""
    dim = mean.shape[-1] // heads
    pairs = torch.cat([rope.pairs + h * dim for h in range(heads)])
    freq = rope.freq.repeat(heads)
    re, im = pairs[:, 0], pairs[:, 1]
    at = lambda a, b: second[:, a][:, :, b]
    rr, ri, ir, ii = at(re, re), at(re, im), at(im, re), at(im, im)
    minus, plus = freq[:, None] - freq[None], freq[:, None] + freq[None]
    conj = torch.complex(rr + ii, ir - ri) * mean_phase(minus, n)   # E[z_p z_q*]
    plain = torch.complex(rr - ii, ir + ri) * mean_phase(plus, n)   # E[z_p z_q]
    out = torch.empty_like(second)
    put = lambda a, b, value: out.__setitem__(
        (slice(None), a[:, None].expand(len(a), len(b)), b[None].expand(len(a), len(b))), value)
    put(re, re, (conj.real + plain.real) / 2)
    put(im, im, (conj.real - plain.real) / 2)
    put(im, re, (plain.imag + conj.imag) / 2)
    put(re, im, (plain.imag - conj.imag) / 2)
    z = torch.complex(mean[:, re], mean[:, im]) * mean_phase(freq, n)
    mean_out = torch.empty_like(mean)
    mean_out[:, re], mean_out[:, im] = z.real, z.imag
    return mean_out, out


def moments(x):
    """x [W, N, d] -> mean [W, d], second moment [W, d, d], in double."""
    x = x.double()
    return x.mean(1), x.transpose(1, 2) @ x / x.shape[1]


def principal_axes(covariance, metric, relative_ridge=1e-3):
    """Encode and decode matrices and variances, largest first; least error e^T metric e."""
    d = covariance.shape[-1]
    eye = torch.eye(d, device=covariance.device, dtype=torch.float64)
    if metric is None:
        root = inverse = eye.expand_as(covariance)
    else:
        trace = metric.diagonal(dim1=-2, dim2=-1).sum(-1)[..., None, None] / d
        value, vector = torch.linalg.eigh(metric / trace + relative_ridge * eye)
        s = value.clamp_min(1e-12).sqrt()
        # Symmetric root, with the metric's own size kept: groups then compare in one unit.
        size = trace.sqrt()
        root = vector * s[..., None, :] @ vector.transpose(-1, -2) * size
        inverse = vector / s[..., None, :] @ vector.transpose(-1, -2) / size
    value, vector = torch.linalg.eigh(root @ covariance @ root)
    vector, value = vector.flip(-1), value.flip(-1).clamp_min(0)
    return root @ vector, vector.transpose(-1, -2) @ inverse, value


def query_metric(lab, l, heads, joint, spec):
    """Second moment of the queries that meet `heads` (block diagonal if joint)."""
    g = lab.model.q_heads // lab.model.kv_heads
    q = lab.rows(l, 'q', spec)
    blocks = []
    for h in heads:
        x = torch.cat([q[:, h * g + i] for i in range(g)], 1)
        mean, second = moments(x)
        if spec['weight'] == 'avg':
            mean, second = average_over_positions(mean, second, lab.model.ropes[l], 1, lab.length)
        blocks.append(second)
    if not joint:
        return sum(blocks)
    return torch.stack([torch.block_diag(*per_window) for per_window in zip(*blocks)])


def value_metric(lab, l, heads, joint, windows):
    w = lab.model.output_moment(l)
    m = torch.block_diag(*[w[h] for h in heads]) if joint else sum(w[h] for h in heads)
    return m.expand(windows, -1, -1)


def group_moments(lab, l, side, heads, joint, spec):
    """(mean, covariance) of the rows that the group codes, in the space they are coded in."""
    space = spec.get('space', 'avg') if side == 'k' else None
    x = lab.rows(l, side, spec, rotated=space == 'post')
    parts = [x[:, h] for h in heads]
    x = torch.cat(parts, -1 if joint else 1)
    mean, second = moments(x)
    n_heads = len(heads) if joint else 1
    rope = lab.model.ropes[l]
    if spec.get('prior') and spec['src'] == 'prompt':
        other, prior = dict(spec, src='file'), float(spec['prior'])
        y = lab.rows(l, side, other, rotated=space == 'post')
        m2, s2 = moments(torch.cat([y[:, h] for h in heads], -1 if joint else 1))
        share = prior / (prior + x.shape[1])
        mean, second = mean * (1 - share) + m2 * share, second * (1 - share) + s2 * share
    if space == 'res':
        centred = second - mean[:, :, None] * mean[:, None]
        zero = torch.zeros_like(mean)
        return average_over_positions(zero, centred, rope, n_heads, lab.length)
    if space == 'avg':
        mean, second = average_over_positions(mean, second, rope, n_heads, lab.length)
    return mean, second - mean[:, :, None] * mean[:, None]


def split_heads(n_heads, size):
    """Contiguous groups of `size` heads; a last one may be smaller."""
    return [list(range(h, min(h + size, n_heads))) for h in range(0, n_heads, size)]


def fit_side(lab, l, side, spec):
    """Groups of one layer and side; spec: see rows.py."""
    groups = []
    for heads in split_heads(lab.model.kv_heads, spec.get('heads', 1)):
        joint = not spec.get('shared', False)
        mean, covariance = group_moments(lab, l, side, heads, joint, spec)
        if spec.get('basis', 'pca') == 'id':
            eye = torch.eye(mean.shape[-1], device=mean.device).expand_as(covariance)
            encode, decode, variance = eye, eye, covariance.diagonal(dim1=-2, dim2=-1)
        else:
            metric = None
            if spec.get('weight') == 'out':
                metric = value_metric(lab, l, heads, joint, mean.shape[0])
            elif spec.get('weight'):
                metric = query_metric(lab, l, heads, joint, spec)
            encode, decode, variance = principal_axes(covariance, metric)
        groups.append(Group(heads, joint, mean.float(), half(encode.float()),
                            half(decode.float()), variance.float().clamp_min(1e-20)))
    return groups


def reference_rank(variance, share=0.90):
    """The smallest rank whose sum of sigma is `share` of the whole."""
    sigma = variance.sqrt()
    total = sigma.sum(-1, keepdim=True)
    return (sigma.cumsum(-1) < share * total).sum(-1) + 1


def plan_bits(groups, spec, budget):
    """Sets bits of every group, pooled over the layer's heads."""
    if budget == 'reference':  # 4 bits for the first quarter of the channels, 2 for the others
        ranks = torch.stack([reference_rank(g.variance) for g in groups]).amin(0)[:, None]
        for g in groups:
            i = torch.arange(g.variance.shape[-1], device=ranks.device)[None]
            high = (ranks // 4).clamp_min(1)
            g.bits = torch.where(i < high, 4, torch.where(i < ranks, 2, 0))
        return
    if isinstance(budget, str):  # 'u4': 4 bits for every channel
        for g in groups:
            g.bits = torch.full_like(g.variance, int(budget[1:])).long()
        return
    # A basis that several heads use one by one counts once per head.
    times = [1 if g.joint else len(g.heads) for g in groups]
    pool = torch.cat([g.variance.repeat(1, t) for g, t in zip(groups, times)], -1)
    bits = water_fill(pool, budget, spec['scheme'], tuple(spec.get('choices', CHOICES)))
    at = 0
    for g, t in zip(groups, times):
        d = g.variance.shape[-1]
        g.bits = bits[:, at:at + d]
        at += d * t
