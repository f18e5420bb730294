#include "fsdp/flat_param/storage.h"

#include <features.h>

#ifdef __GLIBC__
#include <dlfcn.h>
#include <malloc.h>
#endif

#include <utility>

#include "tessera/base/internal/block_cache.h"
#include "tessera/tensor/internal/empty_shard.h"

namespace tessera::fsdp {

namespace {

// Lower than for shards of tensors: units are smaller, and are allocated for every call.
constexpr std::size_t kLargeBytes = std::size_t{1} << 20;

}  // namespace

c10::DataPtr take_storage(const at::Tensor& tensor) {
  c10::StorageImpl& storage = *tensor.storage().unsafeGetStorageImpl();
  storage.set_nbytes(0);
  return storage.set_data_ptr(c10::DataPtr(nullptr, storage.device()));
}

void free_storage(const at::Tensor& tensor) { take_storage(tensor); }

void allocate_storage(const at::Tensor& tensor) {
  c10::StorageImpl& storage = *tensor.storage().unsafeGetStorageImpl();
  const at::Tensor fresh = empty_flat(tensor.numel(), tensor.options().requires_grad(false));
  c10::StorageImpl& from = *fresh.storage().unsafeGetStorageImpl();
  storage.set_nbytes(from.nbytes());
  storage.set_data_ptr_noswap(from.set_data_ptr(c10::DataPtr(nullptr, from.device())));
}

void set_storage(const at::Tensor& tensor, void* data, std::shared_ptr<const void> owner) {
  using Owner = std::shared_ptr<const void>;
  c10::StorageImpl& storage = *tensor.storage().unsafeGetStorageImpl();
  storage.set_nbytes(static_cast<std::size_t>(tensor.numel()) * tensor.element_size());
  storage.set_data_ptr_noswap(c10::DataPtr(
      data, new Owner(std::move(owner)), [](void* context) { delete static_cast<Owner*>(context); }, at::kCPU));
}

at::Tensor empty_flat(std::int64_t numel, const at::TensorOptions& options) {
  return empty_shard({numel}, options, kLargeBytes);
}

void return_free_memory() {
  release_cached_blocks();
#ifdef __GLIBC__
  // Only for glibc's own malloc. If another has replaced it (jemalloc, a sanitizer), this would create a second heap.
  Dl_info malloc_info, trim_info;
  const bool has_both = ::dladdr(::dlsym(RTLD_DEFAULT, "malloc"), &malloc_info) != 0 &&
                        ::dladdr(::dlsym(RTLD_DEFAULT, "malloc_trim"), &trim_info) != 0;
  if (has_both && malloc_info.dli_fbase == trim_info.dli_fbase) ::malloc_trim(0);
#endif
}

}  // namespace tessera::fsdp
