"""Runs a model over windows of text with exact and with coded caches and compares the outcome."""
import functools
import math
import time

import torch

import fits
import quantisers as quant

BLOCK = 512   # queries that are attended together
CHUNK = 64    # tokens of one ubatch: they see each other exactly
FULL = 32768  # tokens for which stored bits are stated


class Lab:
    """Exact run over `ids` [W, L]; what it computed serves as sample for fits and as reference."""

    def __init__(self, model, ids, calibration=None):
        self.model, self.ids, self.length = model, ids, ids.shape[1]
        self.calibration = calibration or self
        self.data, self.fit_cache, self.table_cache = {}, {}, {}

        def attend(l, q, k, v):
            if l in model.coded_layers:
                self.data[l] = {'q': q, 'k': k, 'v': v}
            rope = model.ropes[l]
            k, v = quant.half(rope(k)), quant.half(v)
            return attend_exact(rope(q), k, v, model.windows[l])

        self.hidden = model.forward(ids, attend)[:, self.length // 2:]

    def rows(self, l, side, spec, rotated=False):
        """The sample of a fit [W, heads, N, D], un-rotated unless asked."""
        if spec['src'] == 'prompt':
            x = self.data[l][side][:, :, 4:spec['fit_tokens']]
            return self.model.ropes[l](x, 4) if rotated else x
        x = self.calibration.data[l][side][:, :, 4:]
        x = self.model.ropes[l](x, 4) if rotated else x
        return x.transpose(0, 1).reshape(1, x.shape[1], -1, x.shape[-1])

    def plan(self, l, side, spec):
        """Groups with bits; None for what is not a codec with a fit."""
        keys = ('space', 'basis', 'weight', 'src', 'fit_tokens', 'heads', 'shared', 'prior')
        key = (l, side) + tuple(spec.get(k) for k in keys)
        if key not in self.fit_cache:
            self.fit_cache[key] = fits.fit_side(self, l, side, spec)
        groups = [fits.Group(**vars(g)) for g in self.fit_cache[key]]
        kind, bits = quant.Scheme(spec['scheme']), spec['bits']
        bits = bits[l] if isinstance(bits, dict) else bits
        if kind.gain:
            bits -= kind.token_bits(groups[0].variance.shape[1])
        fits.plan_bits(groups, spec, bits)
        if kind.trained:
            kind.tables = self.tables(side, spec)
        return groups, kind

    def tables(self, side, spec):
        """Levels trained on the calibration text's latents, one table per number of bits."""
        key = (side, spec.get('space'), spec.get('weight'), spec.get('heads'))
        if key not in self.table_cache:
            samples = []
            for l in self.model.coded_layers:
                source = dict(spec, src='file', scheme='log8/32', bits=4.0)
                groups, _ = self.calibration.plan(l, side, source)
                x = self.rows(l, side, source, rotated=side == 'k' and spec.get('space') != 'pre')
                for g in groups:
                    z = (join(x, g.heads, g.joint)[:, :8192] - g.mean[:, None]) @ g.encode
                    y = z[:, :z.shape[1] // 32 * 32].reshape(-1, 32, z.shape[-1])
                    y = y / y.pow(2).mean(1, keepdim=True).sqrt()
                    samples.append(y[::8].flatten())
            y = torch.cat(samples)
            y = y[torch.randperm(len(y), device=y.device)]
            self.table_cache[key] = quant.train_tables(y[:2 ** 23])
        return self.table_cache[key]


def join(x, heads, joint):
    """x [W, H, N, D] -> [W, N, len(heads) * D], or of the first head only."""
    return torch.cat([x[:, h] for h in heads], -1) if joint else x[:, heads[0]]


def causal(first, last, key_first, key_last, window, device):
    t = torch.arange(first, last, device=device)[:, None]
    j = torch.arange(key_first, key_last, device=device)[None]
    seen = j <= t
    return seen & (j > t - window) if window else seen


def softmax_sum(q, k, v, seen):
    """q [W, Hq, B, D], k and v [W, H, n, D], seen [B, n] -> [W, Hq, B, D]."""
    w, hq, b, d = q.shape
    g = hq // k.shape[1]
    s = q.reshape(w, k.shape[1], g * b, d) @ k.transpose(-1, -2)
    bias = torch.zeros_like(seen, dtype=s.dtype).masked_fill_(~seen, -math.inf)
    s = s.mul_(d ** -0.5).add_(bias.repeat(g, 1))
    return (torch.softmax(s, -1) @ v).reshape(w, hq, b, d)


def attend_exact(q, k, v, window):
    out = torch.empty_like(q)
    length = q.shape[2]
    for a in range(0, length, BLOCK):
        b = min(a + BLOCK, length)
        first = max(0, a - window + 1) if window else 0
        seen = causal(a, b, first, b, window, q.device)
        out[:, :, a:b] = softmax_sum(q[:, :, a:b], k[:, :, first:b], v[:, :, first:b], seen)
    return out


def attend_coded(q, k, v, k_coded, v_coded, ends, sinks):
    """Query t sees tokens sinks .. ends[t] - 1 as codes and the others up to t exactly."""
    out = torch.empty_like(q)
    length = q.shape[2]
    for a in range(0, length, BLOCK):
        b = min(a + BLOCK, length)
        low, high = max(int(ends[a]), sinks), max(int(ends[b - 1]), sinks)
        end = torch.as_tensor(ends[a:b], device=q.device)[:, None]
        j = torch.arange(sinks, high, device=q.device)[None]
        t = torch.arange(a, b, device=q.device)[:, None]
        exact = torch.arange(low, b, device=q.device)[None]
        seen = torch.cat([(j < end) & (j <= t), causal(a, b, 0, sinks, 0, q.device),
                          (exact >= end) & (exact <= t)], 1)
        keys = torch.cat([k_coded[:, :, sinks:high], k[:, :, :sinks], k[:, :, low:b]], 2)
        values = torch.cat([v_coded[:, :, sinks:high], v[:, :, :sinks], v[:, :, low:b]], 2)
        out[:, :, a:b] = softmax_sum(q[:, :, a:b], keys, values, seen)
    return out


def coded_ends(length, row):
    """For every query, the end of the tokens it sees as codes."""
    if row['mode'] == 'immediate':  # a cache of one format: even the query's own token is coded
        return list(range(1, length + 1))
    page, ends = row['page'], []
    for t in range(length):
        start = t // CHUNK * CHUNK
        pages = max(0, start - row['sinks'] - row['recent']) // page
        ends.append(row['sinks'] + pages * page if start >= row['fit_tokens'] else 0)
    return ends


def code_fixed(x, kind):
    """Formats without a fit: llama.cpp's (+had: rotated) and KIVI's. x [W, H, N, D]."""
    name, _, rotated = kind.partition('+')
    if rotated:
        h = quant.hadamard(x.shape[-1], str(x.device))
        return code_fixed(x @ h, name) @ h
    if name == 'q8_0':
        return quant.q8_0(x)
    if name == 'q4_0':
        return quant.q4_0(x)
    bits = torch.tensor(float(name[-1]), device=x.device)
    w, heads, n, d = x.shape
    if name.startswith('kivi_k'):
        return quant.min_max(x.view(w, heads, n // 32, 32, d), bits, 3).view_as(x)
    return quant.min_max(x.view(w, heads, n, d // 32, 32), bits, 4).view_as(x)


def fixed_bits(kind):
    name = kind.partition('+')[0]
    return {'fp16': 16.0, 'q8_0': 8.5, 'q4_0': 4.5}.get(name) or int(name[-1]) + 1.0


class Run:
    """One row over one lab: plans of all layers, then the coded forward pass and its scores."""

    def __init__(self, lab, row):
        self.lab, self.row, self.plans = lab, row, {}
        code, basis = [], []
        for l in lab.model.coded_layers:
            for side in 'kv':
                spec = self.spec(l, side)
                if spec['kind'] != 'codec':
                    code.append(fixed_bits(spec['kind']))
                    basis.append(0.0)
                    continue
                self.plans[l, side] = groups, kind = lab.plan(l, side, spec)
                c, b = self.cost(spec, groups, kind)
                code.append(c)
                basis.append(b)
        self.code = sum(code) / len(code)
        self.basis = sum(basis) / len(basis)

    def spec(self, l, side):
        only = self.row.get('only')
        return self.row[side] if only is None or (l, side) in only else {'kind': 'fp16'}

    def cost(self, spec, groups, kind):
        """(bits of codes and scales per element, bits of the bases per element of one token)."""
        elements = self.lab.model.kv_heads * self.lab.model.dim
        code = basis = 0.0
        for g in groups:
            times = 1 if g.joint else len(g.heads)
            d, rank = g.bits.shape[1], (g.bits > 0).float().sum(-1).mean().item()
            code += times * (g.bits.float().sum(-1).mean().item() + rank * kind.scale_bits()
                             + d * kind.token_bits(d))
            matrices = 0 if spec.get('basis') == 'id' else 2 if spec.get('weight') else 1
            basis += (matrices * rank * 16 + 32) * d if spec['src'] == 'prompt' else 0
        return code / elements, basis / elements

    def stored(self, tokens=FULL):
        """Bits per element of everything, at `tokens`; windowed layers hold their window."""
        row, model = self.row, self.lab.model
        immediate = row['mode'] == 'immediate'
        exact = 0 if immediate else row['sinks'] + row['recent'] + row['page'] / 2
        full = ((tokens - exact) * self.code + exact * 16 + self.basis)
        windowed = [w for w in model.windows if w]
        local_bits = sum(map(fixed_bits, row.get('local') or ('fp16', 'fp16'))) / 2
        local = sum(min(w, tokens) for w in windowed)
        layers = len(model.coded_layers)
        return (layers * full + local * local_bits) / (layers * tokens + local), full / tokens

    def decode(self, l, side, x, cached, rope):
        """What the codes of `cached` (x: un-rotated) say; tokens that fill no page stay."""
        spec, row = self.spec(l, side), self.row
        if spec['kind'] == 'fp16':
            return cached
        first = row['sinks']
        last = first + (x.shape[2] - first) // row['page'] * row['page']
        space = spec.get('space', 'avg') if side == 'k' and spec['kind'] == 'codec' else None
        source = quant.half(x) if space == 'pre' else cached
        if spec['kind'] != 'codec':
            out = code_fixed(source[:, :, first:last], spec['kind'])
        else:
            out = self.decode_groups(l, side, source[:, :, first:last], space, rope)
        if space == 'pre':
            out = rope(out, first)
        whole = cached.clone()
        whole[:, :, first:last] = out
        return whole

    def decode_groups(self, l, side, x, space, rope):
        groups, kind = self.plans[l, side]
        out = torch.empty_like(x)
        if space == 'res':
            mean = self.rotated_mean(l, x.shape[2], rope)
            x = x - mean
        for g in groups:
            for heads in ([g.heads] if g.joint else [[h] for h in g.heads]):
                y = join(x, heads, g.joint)
                z = (y - g.mean[:, None]) @ g.encode
                z = kind(z, g.bits.expand(len(z), -1), g.variance.sqrt().expand(len(z), -1))
                y = (z @ g.decode + g.mean[:, None]).chunk(len(heads), -1)
                for h, part in zip(heads, y):
                    out[:, h] = part
        return out + mean if space == 'res' else out

    def rotated_mean(self, l, n, rope):
        spec = self.row['k']
        mean = self.lab.rows(l, 'k', spec).mean(2, keepdim=True)
        return rope(mean.expand(-1, -1, n, -1), self.row['sinks'])

    def attend(self, ends, l, q, k, v):
        model, rope = self.lab.model, self.lab.model.ropes[l]
        cached_k, cached_v = quant.half(rope(k)), quant.half(v)
        q = rope(q)
        if self.row.get('q8_query'):
            q = code_fixed(q, 'q8_0+had' if '+had' in self.row['k']['kind'] else 'q8_0')
        if model.windows[l]:
            if self.row.get('local'):
                cached_k = code_fixed(cached_k, self.row['local'][0])
                cached_v = code_fixed(cached_v, self.row['local'][1])
            return attend_exact(q, cached_k, cached_v, model.windows[l])
        coded_k = self.decode(l, 'k', k, cached_k, rope)
        coded_v = self.decode(l, 'v', v, cached_v, rope)
        return attend_coded(q, cached_k, cached_v, coded_k, coded_v, ends, self.row['sinks'])

    def score(self):
        """KL(exact || coded) of the second half and what follows from it, as a dict."""
        started, lab = time.time(), self.lab
        ends = coded_ends(lab.length, self.row)
        hidden = lab.model.forward(lab.ids, functools.partial(self.attend, ends))
        hidden = hidden[:, lab.length // 2:]
        kl, same, loss = [], [], []
        for w in range(len(hidden)):
            exact, coded = lab.model.log_probs(lab.hidden[w]), lab.model.log_probs(hidden[w])
            kl.append((exact.exp() * (exact - coded)).sum(-1))
            same.append((exact.argmax(-1) == coded.argmax(-1)).float().mean())
            target = lab.ids[w, lab.length // 2 + 1:, None]
            loss.append((exact[:-1] - coded[:-1]).gather(-1, target).mean())
        kl = torch.stack(kl).double()
        means = kl.mean(1)
        total, full = self.stored()
        return {'name': self.row['name'], 'code': self.code, 'stored32k': total, 'full32k': full,
                'kl': means.mean().item(), 'se': (means.std() / len(means) ** 0.5).item(),
                'median': kl.median().item(), 'p999': torch.quantile(kl.flatten(), 0.999).item(),
                'top1': torch.stack(same).mean().item(), 'dnll': torch.stack(loss).mean().item(),
                'by_depth': kl.view(len(kl), 4, -1).mean((0, 2)).tolist(),
                'windows': means.tolist(), 'seconds': time.time() - started}
