"""Scalar quantisers of latent channels, as packed codes would decode, and bits by water-filling."""
import functools

import torch

CHOICES = (0, 1, 2, 3, 4, 6, 8)
# Integer Lloyd-Max levels (positive half) and the value of one unit, as the C++ library stores.
LEVELS = {1: (64,), 2: (12, 40), 3: (10, 31, 55, 88), 4: (5, 15, 25, 36, 48, 62, 79, 104)}
UNIT = {1: 0.012466942, 2: 0.037758745, 3: 0.024446139, 4: 0.026217138,
        5: 0.18813879, 6: 0.10406301, 7: 0.056867658, 8: 0.030762399}


def half(x):
    """What fp16 keeps of x."""
    return x.half().float()


def log_scale(x, mantissa):
    """The nearest scale, by ratio, with 2^mantissa linear steps per power of two."""
    x = x.clamp(2.0 ** -16, 61440.0)
    power = torch.exp2(torch.floor(torch.log2(x)))
    steps = 2.0 ** mantissa
    below = torch.floor(x / power * steps) / steps * power
    above = below + power / steps
    return torch.where(x * x > below * above, above, below)


FINE = 1024  # cells per sigma of the table that finds the nearest Lloyd-Max level
REACH = 4    # sigmas the table reaches; the outermost level is nearest beyond


@functools.lru_cache(None)
def nearest_level(device, trained=None):
    """[5 * (2 * REACH * FINE + 1)]: the level nearest to a cell's centre, for 0..4 bits."""
    y = torch.arange(-REACH * FINE, REACH * FINE + 1, device=device) / FINE
    rows = [torch.zeros_like(y)]
    for b in range(1, 5):
        positive = torch.tensor(LEVELS[b], device=device) * UNIT[b]
        levels = torch.cat([-positive.flip(0), positive])
        if trained:
            levels = torch.tensor(trained[b - 1], device=device)
        rows.append(levels[torch.bucketize(y, (levels[1:] + levels[:-1]) / 2)])
    return torch.cat(rows)


def lloyd_max(y, bits, trained=None):
    """The level of unit-variance y. Up to 4 bits: Lloyd-Max (or `trained`) levels, above: the
    uniform steps that suit a Gaussian. bits broadcasts against y; 0 gives 0."""
    cells = 2 * REACH * FINE + 1
    at = torch.round(y * FINE).clamp(-REACH * FINE, REACH * FINE).long() + REACH * FINE
    few = nearest_level(y.device, trained)[at + bits.clamp(max=4).long() * cells]
    unit = torch.tensor([1.0] + [UNIT[b] for b in range(1, 9)], device=y.device)[bits.long()]
    last = torch.exp2(bits - 1)
    many = (torch.minimum(torch.maximum(torch.floor(y / unit), -last), last - 1) + 0.5) * unit
    return torch.where(bits > 4, many, few)


def min_max(y, bits, dim):
    """fp16 scale and fp16 zero (at the middle code) over `dim`; bits broadcasts, 0 gives 0."""
    low, high = y.amin(dim, keepdim=True), y.amax(dim, keepdim=True)
    steps = (2.0 ** bits - 1).clamp_min(1)
    scale, zero = half((high - low) / steps), half(low / 2 + high / 2)
    code = torch.round((y - zero) / scale.clamp_min(1e-8) + steps / 2).clamp_min(0)
    out = (torch.minimum(code, steps.expand_as(code)) - steps / 2) * scale + zero
    return torch.where(bits > 0, out, torch.zeros_like(out))


def min_max8(y, bits, dim):
    """As min_max with an 8-bit log scale and an 8-bit zero in 32nds of the range."""
    low, high = y.amin(dim, keepdim=True), y.amax(dim, keepdim=True)
    steps = (2.0 ** bits - 1).clamp_min(1)
    zero = low / 2 + high / 2
    wanted = torch.maximum(high - low, zero.abs() / 3.9) / steps
    scale = log_scale(wanted, 3)
    unit = scale * steps / 32
    zero = torch.round(zero / unit).clamp(-128, 127) * unit
    code = torch.round((y - zero) / scale + steps / 2).clamp_min(0)
    out = (torch.minimum(code, steps.expand_as(code)) - steps / 2) * scale + zero
    return torch.where(bits > 0, out, torch.zeros_like(out))


# Eighths of an octave that a least-squares scale may lie away from the rms.
SEARCH = (-4, -2, -1, 1, 2, 3, 4, 6, 8)


class Scheme:
    """A way to scale and code. Text: log8/32, log8ls/32 (least-squares scale), log8m2/32 (2
    mantissa bits), log8lsm2/32, rms16/32 (fp16 rms), minmax/64, mm8/64 (8-bit scale and zero),
    static; each with +gain (8-bit scale per token first) or +tab (levels trained on latents)."""

    def __init__(self, text):
        self.text = text
        name, *flags = text.split('+')
        self.name, _, group = name.partition('/')
        self.group = int(group or 32)
        self.gain, self.trained = 'gain' in flags, 'tab' in flags
        self.tables = None

    def scale_bits(self):
        bits = {'static': 0, 'minmax': 32, 'mm8': 16, 'rms16': 16}.get(self.name, 8)
        return bits / self.group

    def token_bits(self, channels):
        return 8 / channels if self.gain else 0.0

    def __call__(self, z, bits, sigma):
        """z [W, N, r], N a multiple of the group; bits, sigma [W, r]. Returns z as decoded."""
        if self.gain:
            on = (bits > 0).float()[:, None]
            power = ((z / sigma[:, None]) ** 2 * on).sum(-1, keepdim=True)
            token = log_scale((power / on.sum(-1, keepdim=True).clamp_min(1)).sqrt(), 3)
            z = z / token
        w, n, r = z.shape
        y = z.view(w, n // self.group, self.group, r)
        out = self.code(y, bits.float()[:, None, None], sigma[:, None, None]).view(w, n, r)
        return out * token if self.gain else out

    def code(self, y, bits, sigma):
        if self.name == 'minmax':
            return min_max(y, bits, 2)
        if self.name == 'mm8':
            return min_max8(y, bits, 2)
        rms = y.pow(2).mean(2, keepdim=True).sqrt()
        if self.name == 'static':
            return lloyd_max(y / sigma, bits, self.tables) * sigma
        if self.name == 'rms16':
            scale = half(rms).clamp_min(1e-7)
            return lloyd_max(y / scale, bits, self.tables) * scale
        mantissa = int(self.name[-1]) if self.name[-2] == 'm' else 3
        scale = log_scale(rms, mantissa)
        out = lloyd_max(y / scale, bits, self.tables) * scale
        if not self.name.startswith('log8ls'):
            return out
        best = (out - y).pow(2).sum(2, keepdim=True)
        for step in SEARCH:
            other = log_scale(rms * 2.0 ** (step / 8), mantissa)
            trial = lloyd_max(y / other, bits, self.tables) * other
            error = (trial - y).pow(2).sum(2, keepdim=True)
            out = torch.where(error < best, trial, out)
            best = torch.minimum(error, best)
        return out


@functools.lru_cache(None)
def scheme(text):
    return Scheme(text)


@functools.lru_cache(None)
def distortion(text, choices, device):
    """Error per unit variance of a Gaussian at each choice of bits."""
    generator = torch.Generator(device='cpu').manual_seed(0)
    unit = torch.randn(1, 2 ** 14, 16, generator=generator).to(device)
    size = torch.exp2(torch.arange(16, device=device) / 16)[None]
    kind = scheme(text.split('+')[0])
    out = []
    for b in choices:
        bits = torch.full((1, 16), b, device=device)
        z = unit * size[:, None]
        error = (kind(z, bits, size) - z).pow(2).mean(1) / z.pow(2).mean(1)
        out.append(float(error.mean()))
    return torch.tensor(out, device=device)


def water_fill(variance, budget, text, choices=CHOICES):
    """Bits [W, C] of every channel for `budget` bits per channel, codes and scales together."""
    kind, device = scheme(text), variance.device
    choice = torch.tensor(choices, device=device)
    cost = choice.float() + (choice > 0) * kind.scale_bits()
    error = distortion(text, tuple(choices), str(device))
    top = variance.amax(-1).log()
    low, high = top - 60, top + 2
    for _ in range(45):
        price = (low + high) / 2
        pick = (variance[..., None] * error + price.exp()[:, None, None] * cost).argmin(-1)
        over = cost[pick].mean(-1) > budget
        low, high = torch.where(over, price, low), torch.where(over, high, price)
    pick = (variance[..., None] * error + high.exp()[:, None, None] * cost).argmin(-1)
    return choice[pick]


def train_tables(samples, rounds=40):
    """Lloyd's algorithm on unit-rms samples: symmetric levels for 1..4 bits."""
    y = samples.abs()
    tables = []
    for b in range(1, 5):
        n = 2 ** (b - 1)
        levels = torch.quantile(y[:2 ** 20], (torch.arange(n, device=y.device) + 0.5) / n)
        for _ in range(rounds):
            cell = torch.bucketize(y, (levels[1:] + levels[:-1]) / 2)
            count = torch.zeros_like(levels).index_add_(0, cell, torch.ones_like(y))
            total = torch.zeros_like(levels).index_add_(0, cell, y)
            levels = total / count.clamp_min(1)
        tables.append(tuple(torch.cat([-levels.flip(0), levels]).tolist()))
    return tuple(tables)


def q8_0(x):
    """llama.cpp's q8_0 along the last dim."""
    y = x.reshape(*x.shape[:-1], -1, 32)
    d = y.abs().amax(-1, keepdim=True) / 127
    code = torch.round(y / d.clamp_min(1e-12))
    return (code * half(d)).view(x.shape)


def q4_0(x):
    """llama.cpp's q4_0 along the last dim."""
    y = x.reshape(*x.shape[:-1], -1, 32)
    d = y.gather(-1, y.abs().argmax(-1, keepdim=True)) / -8
    inverse = torch.where(d == 0, torch.zeros_like(d), 1 / d)
    return ((torch.floor(y * inverse + 8.5).clamp(0, 15) - 8) * half(d)).view(x.shape)


@functools.lru_cache(None)
def hadamard(n, device):
    h = torch.ones(1, 1)
    while h.shape[0] < n:
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)], 0)
    return (h / n ** 0.5).to(device)
