"""Ranks ways to code a KV cache on a real model. See README.md for the command.

Every row runs the model over the same windows of text with keys and values as the row's codec
would give them back, and is compared with the exact (fp16) cache over the second half of each
window: KL divergence in nats, mean with standard error over windows, median, 99.9 %, same top-1.
"""
import argparse
import json
import time

import numpy as np
import torch

import finalists
import rows
from lab import Lab, Run
from model import Model


def read_tokens(path, model_path):
    if path.endswith('.npy'):
        return np.load(path)
    from llama_cpp import Llama
    vocabulary = Llama(model_path, vocab_only=True, verbose=False)
    with open(path, 'rb') as f:
        return np.array(vocabulary.tokenize(f.read(), add_bos=False, special=False))


def cut_windows(tokens, count, length, bos, device):
    """`count` windows of `length` tokens (with BOS where the model has one), spread evenly."""
    body = length - len(bos)
    if len(tokens) < body:
        raise SystemExit(f'the text has {len(tokens)} tokens; a window needs {body}')
    count = min(count, len(tokens) // body)
    starts = np.linspace(0, len(tokens) - body, count).astype(int)
    ids = np.stack([np.concatenate([bos, tokens[s:s + body]]) for s in starts])
    return torch.from_numpy(ids.astype(np.int64)).to(device)


def line(r):
    depth = ' '.join(f'{1e3 * x:.3g}' for x in r['by_depth'])
    return (f"{r['name']:44s} code {r['code']:5.2f} "
            f"32k {r['stored32k']:5.2f} ({r['full32k']:5.2f}) "
            f"KL {1e3 * r['kl']:8.3f} +- {1e3 * r['se']:6.3f} med {1e3 * r['median']:7.3f} "
            f"p999 {r['p999']:7.4f} top1 {100 * r['top1']:5.2f} dNLL {1e3 * r['dnll']:+6.2f} "
            f"depth {depth}  {r['seconds']:.1f}s")


def question_rows(question, lab):
    if question in finalists.QUESTIONS:
        return finalists.QUESTIONS[question](lab)
    return rows.QUESTIONS[question](lab.model.dim)


def main():
    p = argparse.ArgumentParser(description=__doc__.split('\n')[0])
    p.add_argument('-m', '--model', required=True, help='a GGUF file (llama or gemma3)')
    p.add_argument('-f', '--text', required=True, help='text, or its token ids as .npy')
    p.add_argument('--rows', default='peers,baseline',
                   help='of ' + ','.join([*rows.QUESTIONS, *finalists.QUESTIONS]))
    p.add_argument('--ctx', type=int, default=4096)
    p.add_argument('--windows', type=int, default=16)
    p.add_argument('--calibration', type=int, default=16, help='windows of the first quarter')
    p.add_argument('--limit', type=float, default=1e9, help='seconds after which no row begins')
    p.add_argument('--match', default='', help='only rows whose name contains this')
    p.add_argument('--device', default='cuda' if torch.cuda.is_available() else 'cpu')
    p.add_argument('--exact-matmul', action='store_true', help='float32 products instead of TF32')
    p.add_argument('-o', '--out', help='JSON lines, one per row')
    o = p.parse_args()
    began = time.time()
    torch.set_grad_enabled(False)
    torch.backends.cuda.matmul.allow_tf32 = not o.exact_matmul
    model = Model(o.model, o.ctx, o.device)
    tokens = read_tokens(o.text, o.model)
    quarter = len(tokens) // 4
    file_ids = cut_windows(tokens[:quarter], o.calibration, o.ctx, model.bos(), o.device)
    ids = cut_windows(tokens[quarter:], o.windows, o.ctx, model.bos(), o.device)
    calibration = Lab(model, file_ids)
    lab = Lab(model, ids, calibration)
    nll = np.mean([-model.log_probs(h[:-1]).gather(-1, i[o.ctx // 2 + 1:, None]).mean().item()
                   for h, i in zip(lab.hidden, ids)])
    print(f'{len(ids)} windows of {o.ctx}, {len(file_ids)} for calibration; exact NLL {nll:.4f}; '
          f'ready after {time.time() - began:.0f} s', flush=True)
    out = open(o.out, 'a') if o.out else None
    for question in o.rows.split(','):
        for row in question_rows(question, lab):
            if o.match not in row['name']:
                continue
            if time.time() - began > o.limit:
                print('time limit')
                return
            result = Run(lab, row).score()
            print(line(result), flush=True)
            if out:
                out.write(json.dumps(dict(result, question=question, ctx=o.ctx)) + '\n')
                out.flush()


if __name__ == '__main__':
    main()
