"""The rows of the search, by question. A row is a dict:

name; k, v: specs; sinks, recent, page, fit_tokens: as in the C++ cache; mode: 'paged' or
'immediate' (everything coded at once); local: formats of K and V of windowed layers; q8_query.
A spec is {'kind': 'fp16' | 'q8_0[+had]' | 'q4_0[+had]' | 'kivi_kB' | 'kivi_vB'} or a codec:
scheme (quantisers.py), bits (a budget, {layer: budget}, 'reference', or 'u4' for 4 everywhere),
src 'prompt' | 'file',
space of keys 'avg' | 'post' | 'pre' | 'res', weight None | 'avg' | 'rel0' | 'out', heads per basis,
shared, basis 'pca' | 'id', prior (rows of the file's moments mixed in), choices of bits.
"""
BUDGETS = (2.0, 3.0, 4.4, 6.4)


def fixed(name, k, v, window=None, **more):
    """A format without a fit; window None: everything coded, as llama.cpp ships it."""
    sinks, recent = window or (0, 0)
    row = {'name': name, 'k': {'kind': k}, 'v': {'kind': v}, 'sinks': sinks, 'recent': recent,
           'page': 32, 'fit_tokens': 0, 'mode': 'paged' if window else 'immediate'}
    return dict(row, **more)


def palu(name, bits, k=None, v=None, window=(4, 64), fit_tokens=None, dim=64, **both):
    spec = {'kind': 'codec', 'scheme': 'log8/32', 'src': 'prompt', 'bits': bits}
    spec['fit_tokens'] = fit_tokens or 8 * dim
    spec.update(both)
    key, value = dict(spec, **(k or {})), dict(spec, **(v or {}))
    page = max(32, *(int(s['scheme'].split('+')[0].partition('/')[2] or 32) for s in (key, value)))
    return {'name': f'{name} @{bits}' if not isinstance(bits, dict) else name, 'k': key, 'v': value,
            'sinks': window[0], 'recent': window[1], 'page': page, 'mode': 'paged',
            'fit_tokens': spec['fit_tokens']}


def peers(dim):
    yield fixed('fp16', 'fp16', 'fp16')
    for had in ('', '+had'):
        for k, v in (('q8_0', 'q8_0'), ('q8_0', 'q4_0'), ('q4_0', 'q4_0')):
            name = f'{k}{had}' if k == v else f'K {k} V {v}{had}'
            local = (k + had, v + had)
            yield fixed(name, k + had, v + had, local=local, q8_query=bool(had))
            if had:
                yield fixed(name + ' f32 query', k + had, v + had, local=local)
                for window in ((4, 64), (4, 128)):
                    yield fixed(f'{name} {window[0]}/{window[1]}', k + had, v + had, window)
    for b in (2, 4):
        for window in ((0, 0), (0, 128), (4, 64), (4, 128)):
            yield fixed(f'kivi{b} {window[0]}/{window[1]}', f'kivi_k{b}', f'kivi_v{b}', window)


def baseline(dim):  # question a
    for b in BUDGETS:
        for src in ('prompt', 'file'):
            for scheme in ('log8/32', 'log8/64', 'minmax/32', 'minmax/64', 'minmax/128'):
                yield palu(f'{src} {scheme}', b, scheme=scheme, src=src, dim=dim)
        yield palu('prompt log8/32 recent 112', b, window=(4, 112), dim=dim)
        yield palu('prompt log8/64 recent 96', b, window=(4, 96), scheme='log8/64', dim=dim)


def query_aware(dim):  # question b
    for b in BUDGETS:
        for src in ('prompt', 'file'):
            for weight in ('avg', 'rel0'):
                yield palu(f'{src} K w-{weight}', b, src=src, k={'weight': weight}, dim=dim)
        yield palu('file K w-avg V w-out', b, src='file', k={'weight': 'avg'},
                   v={'weight': 'out'}, dim=dim)
        yield palu('file V w-out', b, src='file', v={'weight': 'out'}, dim=dim)
        yield palu('prompt K, file K metric only', b, dim=dim, k={'weight': 'avg', 'prior': 2048})
        yield palu('prompt prior 512', b, dim=dim, prior=512)
        yield palu('prompt prior 2048', b, dim=dim, prior=2048)


def joint(dim):  # question c
    for b in BUDGETS:
        for src in ('prompt', 'file'):
            for heads in (2, 3):
                h = {'heads': heads}
                yield palu(f'{src} K joint{heads}', b, src=src, k=h, dim=dim)
                yield palu(f'{src} V joint{heads}', b, src=src, v=h, dim=dim)
                yield palu(f'{src} KV joint{heads}', b, src=src, k=h, v=h, dim=dim)
        yield palu('prompt KV shared3', b, heads=3, shared=True, dim=dim)
        yield palu('prompt V joint3 fit 1024', b, v={'heads': 3}, fit_tokens=1024, dim=dim)


def residual(dim):  # question d, and keys before RoPE as the bound
    for b in BUDGETS:
        for src in ('prompt', 'file'):
            yield palu(f'{src} K res', b, src=src, k={'space': 'res'}, dim=dim)
            yield palu(f'{src} K pre', b, src=src, k={'space': 'pre'}, dim=dim)
        yield palu('prompt K post as they came', b, k={'space': 'post'}, dim=dim)


def combined(dim):  # question e
    w, r, j = {'weight': 'avg'}, {'space': 'res'}, {'heads': 3}
    for b in BUDGETS:
        for src in ('prompt', 'file'):
            yield palu(f'{src} K w res', b, src=src, k=dict(w, **r), dim=dim)
            yield palu(f'{src} K w pre', b, src=src, k={'weight': 'avg', 'space': 'pre'}, dim=dim)
            yield palu(f'{src} K w, V joint', b, src=src, k=w, v=j, dim=dim)
            yield palu(f'{src} K w res, V joint', b, src=src, k=dict(w, **r), v=j, dim=dim)
            yield palu(f'{src} K w res joint, V joint', b, src=src, v=j, dim=dim,
                       k=dict(w, **r, **j))
            yield palu(f'{src} K w joint, V joint', b, src=src, k=dict(w, **j), v=j, dim=dim)
            yield palu(f'{src} K w pre joint, V joint', b, src=src, v=j, dim=dim,
                       k=dict(w, **j, space='pre'))
        yield palu('file K w joint, V joint, minmax/128', b, src='file', k=dict(w, **j), v=j,
                   scheme='minmax/128', dim=dim)


def controls(dim):  # question f and k
    for b in BUDGETS:
        for src in ('prompt', 'file'):
            yield palu(f'{src} id', b, src=src, basis='id', dim=dim)
        yield palu('prompt id, K res', b, basis='id', k={'space': 'res'}, dim=dim)
    yield palu('reference', 'reference', space='post', scheme='minmax/32', window=(0, 0), dim=dim)
    yield palu('reference 4/64', 'reference', space='post', scheme='minmax/32', dim=dim)
    yield palu('reference whole', 'reference', k={'space': 'post', 'fit_tokens': 4096},
               v={'fit_tokens': 4096}, scheme='minmax/32', window=(0, 0), dim=dim)


K_W, K_RES, JOINT = {'weight': 'avg'}, {'space': 'res'}, {'heads': 3}


def quantisers(dim):  # question j
    schemes = ('log8ls/32', 'log8ls/64', 'log8ls/128', 'mm8/32', 'mm8/64', 'minmax/128',
               'log8lsm2/32', 'log8ls/32+tab', 'log8ls/32+gain', 'rms16/32', 'log8ls/16')
    for b in BUDGETS:
        for scheme in schemes:
            yield palu(f'prompt {scheme}', b, scheme=scheme, dim=dim)
        yield palu('prompt log8ls/32 also 5, 7 bits', b, scheme='log8ls/32', dim=dim,
                   choices=(0, 1, 2, 3, 4, 5, 6, 7, 8))
        yield palu('prompt log8ls/32 only 0, 2, 4, 8', b, scheme='log8ls/32', dim=dim,
                   choices=(0, 2, 4, 8))
        for scheme in ('log8ls/32', 'log8ls/64', 'mm8/64', 'minmax/128', 'log8ls/32+tab'):
            yield palu(f'prompt K w res {scheme}', b, k=dict(K_W, **K_RES), scheme=scheme, dim=dim)


def combined_quantisers(dim):  # e again, with scales that do not clip
    for b in BUDGETS:
        for scheme in ('log8ls/32', 'log8ls/64', 'minmax/128'):
            yield palu(f'prompt K w {scheme}', b, k=K_W, scheme=scheme, dim=dim)
            for src in ('prompt', 'file'):
                more = dict(src=src, v=JOINT, scheme=scheme, dim=dim)
                yield palu(f'{src} K w joint, V joint {scheme}', b, k=dict(K_W, **JOINT), **more)
                yield palu(f'{src} K w res joint, V joint {scheme}', b,
                           k=dict(K_W, **JOINT, **K_RES), **more)
        yield palu('prompt K w res, V joint log8ls/32', b, k=dict(K_W, **K_RES), v=JOINT,
                   scheme='log8ls/32', dim=dim)
        yield palu('prompt K res log8ls/32', b, k=K_RES, scheme='log8ls/32', dim=dim)
        yield palu('prompt K w pre log8ls/32', b, k=dict(K_W, space='pre'), scheme='log8ls/32',
                   dim=dim)
        yield palu('prompt id log8ls/32', b, basis='id', scheme='log8ls/32', dim=dim)


def split(dim):  # question h, first half
    for b in BUDGETS:
        for d in (-0.5, 0.5):
            yield palu(f'prompt K w, K {d:+} V {-d:+}', b, k=dict(K_W, bits=b + d),
                       v={'bits': b - d}, scheme='log8ls/32', dim=dim)


def one_head(dim):  # a to f for models with one KV head, where nothing can be joint
    for b in BUDGETS:
        for src in ('prompt', 'file'):
            for scheme in ('log8ls/64', 'minmax/128'):
                yield palu(f'{src} K w {scheme}', b, src=src, k=K_W, scheme=scheme, dim=dim)
            yield palu(f'{src} log8ls/64', b, src=src, scheme='log8ls/64', dim=dim)
            yield palu(f'{src} K w res log8ls/64', b, src=src, k=dict(K_W, **K_RES),
                       scheme='log8ls/64', dim=dim)
        yield palu('prompt log8/32', b, dim=dim)
        yield palu('prompt K w pre log8ls/64', b, k=dict(K_W, space='pre'), scheme='log8ls/64',
                   dim=dim)
        yield palu('prompt id log8ls/64', b, basis='id', scheme='log8ls/64', dim=dim)
        for n in (512, 1024):
            yield palu(f'prompt K w fit {n} log8ls/64', b, k=K_W, scheme='log8ls/64',
                       fit_tokens=n, dim=dim)
        for local in ('q8_0+had', 'q4_0+had'):
            row = palu(f'prompt K w log8ls/64, local {local}', b, k=K_W, scheme='log8ls/64',
                       dim=dim)
            yield dict(row, local=(local, local))
    yield fixed('fp16, local q8_0+had', 'fp16', 'fp16', local=('q8_0+had', 'q8_0+had'))
    yield fixed('fp16, local q4_0+had', 'fp16', 'fp16', local=('q4_0+had', 'q4_0+had'))
    yield palu('reference', 'reference', space='post', scheme='minmax/32', window=(0, 0), dim=dim)


QUESTIONS = {f.__name__: f for f in (peers, baseline, query_aware, joint, residual, combined,
                                     controls, quantisers, combined_quantisers, split, one_head)}
