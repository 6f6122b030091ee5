// KVCache: argument checks, then one Sequence per batch element.
#include <algorithm>
#include <cmath>
#include <optional>
#include <string>

#include "base/tensor_io.h"
#include "base/threads.h"
#include "cache/attention.h"
#include "cache/attention_common.h"
#include "cache/kv_cache_impl.h"
#include "palu/errors.h"

namespace palu {
namespace {

OwnedTensor MakeTensor(DType dtype, std::array<int64_t, 4> shape) {
  OwnedTensor tensor;
  tensor.dtype = dtype;
  tensor.shape = shape;
  tensor.data.resize(static_cast<size_t>(shape[0] * shape[1] * shape[2] * shape[3]) *
                     DTypeBytes(dtype));
  return tensor;
}

}  // namespace

KVCache::KVCache(std::unique_ptr<KVCacheImpl> impl) : impl_(std::move(impl)) {}
KVCache::KVCache(KVCache&&) noexcept = default;
KVCache& KVCache::operator=(KVCache&&) noexcept = default;
KVCache::~KVCache() = default;

int64_t KVCache::size() const { return impl_->sequences[0].size(); }
const LayerShape& KVCache::shape() const { return impl_->context->shape; }
const KVCacheConfig& KVCache::config() const { return impl_->given; }

void KVCache::Append(const ConstTensor& k, const ConstTensor& v, const AppendArgs& args) {
  const LayerShape& s = shape();
  const int64_t batch = static_cast<int64_t>(impl_->sequences.size());
  const std::string where = Where(s);
  CheckTensor(k, (where + "K").c_str(), {batch, s.kv_heads, -1, s.head_dim_k});
  CheckTensor(v, (where + "V").c_str(), {batch, s.kv_heads, k.shape[2], s.head_dim_v});
  for (int64_t b = 0; b < batch; ++b) impl_->sequences[b].CheckAppend(k, v, b, args);
  for (Sequence& sequence : impl_->sequences) sequence.DropOutsideWindow();
  Seal();
  // Memory may still run out halfway through a batch: take back what the earlier sequences got.
  for (int64_t b = 0; b < batch; ++b) {
    try {
      impl_->sequences[b].Append(k, v, b, args);
    } catch (...) {
      for (int64_t done = 0; done < b; ++done) {
        impl_->sequences[done].Trim(k.shape[2], std::nullopt);
      }
      throw;
    }
  }
}

void KVCache::Attend(const AttendArgs& args, const MutableTensor& out) const {
  const LayerShape& s = shape();
  const int64_t batch = static_cast<int64_t>(impl_->sequences.size());
  const std::string where = Where(s);
  CheckQueries(s, batch, args.q, out);
  if (size() == 0) throw StateError(where + "attention over an empty cache; append tokens first");
  if (args.q.shape[2] > size()) {
    throw InputError(where + "Q has " + std::to_string(args.q.shape[2]) +
                     " tokens, the cache holds " + std::to_string(size()) +
                     "; queries are its last tokens");
  }
  if (!std::isfinite(args.scale)) throw InputError(where + "scale must be finite");
  if (!(args.soft_cap >= 0)) throw InputError(where + "soft_cap must be at least 0");
  if (args.mask && args.mask_stride != 0 && args.mask_stride < size()) {
    throw InputError(where + "mask_stride is " + std::to_string(args.mask_stride) +
                     "; it must be 0 or at least " + std::to_string(size()));
  }
  for (int64_t b = 0; b < batch; ++b) AttendSequence(impl_->sequences[b], args, b, out);
}

void KVCache::Seal() {
  std::vector<Sequence>& sequences = impl_->sequences;
  std::vector<char> fitted;
  try {
    for (Sequence& sequence : sequences) fitted.push_back(sequence.PrepareSeal());
  } catch (...) {
    for (size_t b = 0; b < fitted.size(); ++b) sequences[b].AbandonSeal(fitted[b]);
    throw;
  }
  for (Sequence& sequence : sequences) sequence.Seal();
  impl_->context->account->ReturnFreedMemory();
}

KVCache::KV KVCache::Reconstruct(DType dtype) const {
  const LayerShape& s = shape();
  const int64_t batch = static_cast<int64_t>(impl_->sequences.size()), n = size();
  KV kv{MakeTensor(dtype, {batch, s.kv_heads, n, s.head_dim_k}),
        MakeTensor(dtype, {batch, s.kv_heads, n, s.head_dim_v})};
  const MutableTensor k = MutableTensor::Dense(kv.k.data.data(), dtype, kv.k.shape);
  const MutableTensor v = MutableTensor::Dense(kv.v.data.data(), dtype, kv.v.shape);
  constexpr int64_t kRows = 256;  // at a time
  std::vector<float> k_rows(static_cast<size_t>(kRows) * s.head_dim_k),
      v_rows(static_cast<size_t>(kRows) * s.head_dim_v);
  for (int64_t b = 0; b < batch; ++b) {
    for (int h = 0; h < s.kv_heads; ++h) {
      for (int64_t t = 0; t < n; t += kRows) {
        const int64_t count = std::min(kRows, n - t);
        impl_->sequences[b].Decode(h, t, count, k_rows.data(), v_rows.data());
        for (int64_t i = 0; i < count; ++i) {
          WriteRow(k, b, h, t + i, k_rows.data() + i * s.head_dim_k);
          WriteRow(v, b, h, t + i, v_rows.data() + i * s.head_dim_v);
        }
      }
    }
  }
  return kv;
}

KVCache::KV KVCache::UpdateAndFetch(const ConstTensor& k, const ConstTensor& v,
                                    const AppendArgs& args) {
  Append(k, v, args);
  Seal();
  return Reconstruct(k.dtype);
}

void KVCache::Trim(int64_t n) {
  std::vector<Sequence>& sequences = impl_->sequences;
  std::vector<std::optional<PageStore>> windows;
  for (const Sequence& sequence : sequences) windows.push_back(sequence.PrepareTrim(n));
  for (size_t b = 0; b < sequences.size(); ++b) sequences[b].Trim(n, std::move(windows[b]));
}

void KVCache::Clear() {
  for (Sequence& sequence : impl_->sequences) sequence.Clear();
}

KVCache KVCache::Fork() const { return KVCache(std::make_unique<KVCacheImpl>(*impl_)); }

int64_t KVCache::nbytes() const {
  int64_t bytes = impl_->shared_basis_bytes();
  for (const Sequence& sequence : impl_->sequences) bytes += sequence.nbytes();
  return bytes;
}

CacheStats KVCache::Stats() const {
  const LayerShape& s = shape();
  const double batch = static_cast<double>(impl_->sequences.size());
  CacheStats stats;
  for (const Sequence& sequence : impl_->sequences) sequence.AddTo(stats);
  stats.basis_bytes += impl_->shared_basis_bytes();
  stats.nbytes += impl_->shared_basis_bytes();
  stats.tokens = size();
  stats.encoded_tokens = static_cast<int64_t>(stats.encoded_tokens / batch);
  stats.exact_tokens = static_cast<int64_t>(stats.exact_tokens / batch);
  stats.residual_energy_k /= batch;
  stats.residual_energy_v /= batch;
  // A layer with a window needs no more tokens, in fp16 either.
  const int64_t needed = s.window > 0 ? std::min<int64_t>(size(), s.window) : size();
  const double elements =
      batch * static_cast<double>(needed) * s.kv_heads * (s.head_dim_k + s.head_dim_v);
  stats.fp16_bytes = static_cast<int64_t>(elements * 2);
  stats.stored_bits_per_element =
      elements > 0 ? static_cast<double>(stats.nbytes) * 8 / elements : 0;
  // Every sequence has a basis of its own.
  for (const Sequence& sequence : impl_->sequences) {
    const LayerCodec* codec = sequence.codec();
    if (!codec) continue;
    stats.epochs = 1;
    stats.rank_k = std::max(stats.rank_k, codec->k.basis_rank());
    stats.rank_v = std::max(stats.rank_v, codec->v.basis_rank());
    stats.assigned_avg_bits =
        std::max({stats.assigned_avg_bits, codec->k.CodeBits(), codec->v.CodeBits()});
    stats.code_bits += (codec->k.StoredBits() + codec->v.StoredBits()) / 2 / batch;
  }
  if (!impl_->context->method->encodes()) {
    stats.assigned_avg_bits = stats.code_bits =
        impl_->context->method->window_codec() == Codec::kF32 ? 32 : 16;
  }
  return stats;
}

}  // namespace palu
