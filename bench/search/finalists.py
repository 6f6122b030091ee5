"""Budgets per layer and side from what each costs alone (question h), and the rows that use them:
the finalists, their windows (g) and the tokens they are fitted on (i)."""
import math

import rows
from lab import Lab, Run

LEAST, MOST = 0.6, 8.0  # bits per element of a layer's keys or values
PROBES = (1.5, 3.5)     # budgets at which one layer's side is measured alone
FRONT = (1.5, 2.0, 2.5, 3.0, 3.5, 4.4, 5.4, 6.4)
LOG64 = {'scheme': 'log8ls/64'}
K_W_RES = dict(rows.K_W, **rows.K_RES)


class Costs:
    """KL of coding one (layer, side) alone, as cost * exp(-slope * bits), on calibration text."""

    def __init__(self, lab, windows=4):
        source = Lab(lab.model, lab.calibration.ids[:windows], lab.calibration)
        self.layers, self.curve = lab.model.coded_layers, {}
        for l in self.layers:
            for side in 'kv':
                low, high = (self.alone(source, l, side, bits) for bits in PROBES)
                slope = math.log(low / high) / (PROBES[1] - PROBES[0])
                slope = min(max(slope, math.log(2)), math.log(6))
                self.curve[l, side] = (low, slope)
        for side in 'kv':
            curves = [self.curve[l, side] for l in self.layers]
            print(f'alone {side} at {PROBES[0]} bits (1e-3 nat / factor per bit):',
                  ' '.join(f'{1e3 * c:.2f}/{math.exp(s):.1f}' for c, s in curves), flush=True)

    def alone(self, source, l, side, bits):
        row = rows.palu('one', bits, src='file', dim=source.model.dim, k=rows.K_W, **LOG64)
        return max(Run(source, dict(row, only={(l, side)})).score()['kl'], 1e-9)

    def plan(self, mean, tied=False):
        """{side: {layer: bits}} of least summed KL; tied: the same bits for K and V."""
        def bits(price, key):
            c, s = self.curve[key]
            return PROBES[0] + math.log(c * s / price) / s

        def at(price):
            plan = {key: min(max(bits(price, key), LEAST), MOST) for key in self.curve}
            if tied:
                plan = {(l, s): (plan[l, 'k'] + plan[l, 'v']) / 2 for l, s in plan}
            return plan

        low, high = -60.0, 20.0
        for _ in range(70):
            middle = (low + high) / 2
            over = sum(at(math.exp(middle)).values()) / len(self.curve) > mean
            low, high = (middle, high) if over else (low, middle)
        plan = at(math.exp(high))
        return {side: {l: plan[l, side] for l in self.layers} for side in 'kv'}


def costs(lab):
    if not hasattr(lab, 'costs'):
        lab.costs = Costs(lab)
    return lab.costs


def planned(lab, name, mean, k=None, v=None, tied=False, scheme='log8ls/64', **more):
    plan = costs(lab).plan(mean, tied)
    key, value = dict(k or {}, bits=plan['k']), dict(v or {}, bits=plan['v'])
    return rows.palu(f'{name} @{mean}', {}, k=key, v=value, scheme=scheme, dim=lab.model.dim,
                     **more)


def finalists(lab):
    joint = lab.model.kv_heads > 1
    for b in FRONT:
        yield planned(lab, 'planned prompt K w', b, k=rows.K_W)
        yield planned(lab, 'planned prompt K w res', b, k=K_W_RES)
        if joint:
            yield planned(lab, 'planned file K w res joint, V joint', b, src='file',
                          k=dict(K_W_RES, **rows.JOINT), v=rows.JOINT)
    for b in (2.0, 3.0, 4.4, 6.4):
        yield planned(lab, 'planned tied prompt K w', b, k=rows.K_W, tied=True)
        yield planned(lab, 'planned file K w', b, k=rows.K_W, src='file')
        yield planned(lab, 'planned file K w res', b, k=K_W_RES, src='file')
        yield planned(lab, 'planned prompt', b)
        yield planned(lab, 'planned prompt id', b, basis='id')
        if b > 2:
            yield planned(lab, 'planned prompt K w res mm8, V log8ls', b,
                          k=dict(K_W_RES, scheme='mm8/64'))
    for b in (4.4, 5.4, 6.4):
        yield planned(lab, 'planned prompt K w res 5, 7 bits', b, k=K_W_RES,
                      choices=(0, 1, 2, 3, 4, 5, 6, 7, 8))
        yield planned(lab, 'planned prompt K w res minmax/128', b, k=K_W_RES, scheme='minmax/128')


def windows(lab):  # question g
    for b in (2.0, 4.4):
        for window in ((0, 0), (4, 0), (4, 32), (0, 64), (4, 128), (4, 256)):
            yield planned(lab, f'planned prompt K w {window[0]}/{window[1]}', b, k=rows.K_W,
                          window=window)


def fit_tokens(lab):  # question i
    for b in (2.0, 4.4):
        for n in (2, 4, 16, 32):
            tokens = n * lab.model.dim
            if tokens < lab.length:
                yield planned(lab, f'planned prompt K w fit {tokens}', b, k=rows.K_W,
                              fit_tokens=tokens)


def small(lab):  # one number per format, for a second context length or model
    for b in (2.0, 3.0, 4.4, 6.4):
        yield rows.palu('prompt K w log8ls/64', b, k=rows.K_W, dim=lab.model.dim, **LOG64)
        yield rows.palu('prompt log8/32', b, dim=lab.model.dim)
        yield planned(lab, 'planned prompt K w', b, k=rows.K_W)
        yield planned(lab, 'planned prompt K w res', b, k=K_W_RES)


QUESTIONS = {f.__name__: f for f in (finalists, windows, fit_tokens, small)}
