"""A transformer read from a GGUF file, in float32, with the attention left to the caller.

Llama (interleaved RoPE) and Gemma 3 (q/k norm, sliding windows, post norms) are known. Weights are
dequantised; activations are never quantised, so two caches differ only by what they store.
"""
import math

import numpy as np
import torch
import torch.nn.functional as F
from gguf import GGUFReader
from gguf.quants import dequantize

GEMMA3_WINDOW_PATTERN = 6  # every sixth layer sees everything
GEMMA3_LOCAL_BASE = 10000.0


def rms_norm(x, weight, eps):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


class Rope:
    """Rotations of one layer: `pairs` = [D/2, 2] dims that turn together, `freq` = [D/2]."""

    def __init__(self, dim, base, interleaved, length, device):
        half = dim // 2
        i = torch.arange(half, device=device)
        self.pairs = torch.stack([2 * i, 2 * i + 1] if interleaved else [i, i + half], 1)
        self.freq = base ** (-torch.arange(half, device=device, dtype=torch.float64) / half)
        angle = torch.arange(length, device=device, dtype=torch.float64)[:, None] * self.freq
        self.cos, self.sin = angle.cos().float(), angle.sin().float()

    def __call__(self, x, first=0):
        """x [..., S, D] at positions first, first + 1, ..."""
        n = x.shape[-2]
        c, s = self.cos[first:first + n], self.sin[first:first + n]
        re, im = x[..., self.pairs[:, 0]], x[..., self.pairs[:, 1]]
        out = torch.empty_like(x)
        out[..., self.pairs[:, 0]] = re * c - im * s
        out[..., self.pairs[:, 1]] = re * s + im * c
        return out


class Model:
    def __init__(self, path, length, device):
        reader = GGUFReader(path)
        self.fields = reader.fields
        self.arch = self.field('general.architecture')
        if self.arch not in ('llama', 'gemma3'):
            raise SystemExit(f'{path} is a {self.arch} model; llama and gemma3 are known')
        self.device = device
        self.gemma = self.arch == 'gemma3'
        self.layers = int(self.hp('block_count'))
        self.q_heads = int(self.hp('attention.head_count'))
        self.kv_heads = int(self.hp('attention.head_count_kv'))
        self.width = int(self.hp('embedding_length'))
        self.dim = int(self.hp('attention.key_length', self.width // self.q_heads))
        self.eps = float(self.hp('attention.layer_norm_rms_epsilon'))
        self.w = {}
        for t in reader.tensors:
            data = np.array(dequantize(t.data, t.tensor_type), dtype=np.float32)
            self.w[t.name] = torch.from_numpy(data).to(device)
        self.embedding = self.w['token_embd.weight']
        self.head = self.w.get('output.weight', self.embedding)
        self.windows = [0] * self.layers
        base = float(self.hp('rope.freq_base', 10000.0))
        rope = Rope(self.dim, base, not self.gemma, length, device)
        self.ropes = [rope] * self.layers
        if self.gemma:
            local = Rope(self.dim, GEMMA3_LOCAL_BASE, False, length, device)
            for l in range(self.layers):
                if l % GEMMA3_WINDOW_PATTERN != GEMMA3_WINDOW_PATTERN - 1:
                    self.windows[l] = int(self.hp('attention.sliding_window'))
                    self.ropes[l] = local
        self.coded_layers = [l for l in range(self.layers) if not self.windows[l]]

    def field(self, name, default=None):
        return self.fields[name].contents() if name in self.fields else default

    def hp(self, name, default=None):
        value = self.field(f'{self.arch}.{name}', default)
        if value is None:
            raise SystemExit(f'the model has no {self.arch}.{name}')
        return value

    def bos(self):
        """[] or [id], as the file says."""
        default = self.gemma
        add = self.field('tokenizer.ggml.add_bos_token', default)
        return [int(self.field('tokenizer.ggml.bos_token_id'))] if add else []

    def output_moment(self, l):
        """Second moment of the columns of W_o that each KV head's values meet: [H, D, D]."""
        g = self.q_heads // self.kv_heads
        w = self.w[f'blk.{l}.attn_output.weight'].view(-1, self.kv_heads, g, self.dim)
        return torch.einsum('ohgd,ohge->hde', w.double(), w.double())

    def forward(self, ids, attend):
        """attend(l, q, k, v): un-rotated [W, heads, S, D] -> [W, q heads, S, D]. Returns the
        normed last hidden state [W, S, width]."""
        x = self.embedding[ids]
        if self.gemma:
            x = x * math.sqrt(self.width)
        for l in range(self.layers):
            x = x + self.attention(l, x, attend)
            x = x + self.feed_forward(l, x)
        return rms_norm(x, self.w['output_norm.weight'], self.eps)

    def attention(self, l, x, attend):
        w = lambda name: self.w[f'blk.{l}.{name}.weight']
        batch, n, _ = x.shape
        h = rms_norm(x, w('attn_norm'), self.eps)
        q, k, v = (F.linear(h, w(name)).view(batch, n, -1, self.dim).transpose(1, 2)
                   for name in ('attn_q', 'attn_k', 'attn_v'))
        if self.gemma:
            q = rms_norm(q, w('attn_q_norm'), self.eps)
            k = rms_norm(k, w('attn_k_norm'), self.eps)
        out = attend(l, q, k, v).transpose(1, 2).reshape(batch, n, -1)
        out = F.linear(out, w('attn_output'))
        return rms_norm(out, w('post_attention_norm'), self.eps) if self.gemma else out

    def feed_forward(self, l, x):
        w = lambda name: self.w[f'blk.{l}.{name}.weight']
        h = rms_norm(x, w('ffn_norm'), self.eps)
        gate = F.linear(h, w('ffn_gate'))
        gate = F.gelu(gate, approximate='tanh') if self.gemma else F.silu(gate)
        out = F.linear(gate * F.linear(h, w('ffn_up')), w('ffn_down'))
        return rms_norm(out, w('post_ffw_norm'), self.eps) if self.gemma else out

    def log_probs(self, hidden):
        return torch.log_softmax(F.linear(hidden, self.head), -1)
