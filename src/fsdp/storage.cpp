#include "fsdp/storage.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <features.h>

#ifdef __GLIBC__
#include <dlfcn.h>
#include <malloc.h>
#endif

#include <memory>

#include "base/block_cache.h"

namespace tessera::fsdp {

namespace {

// Smaller memory costs few page faults.
constexpr std::size_t kLargeBytes = std::size_t{1} << 20;

}  // namespace

void free_storage(const at::Tensor& tensor) {
  c10::StorageImpl& storage = *tensor.storage().unsafeGetStorageImpl();
  storage.set_nbytes(0);
  storage.set_data_ptr_noswap(c10::DataPtr(nullptr, storage.device()));
}

void allocate_storage(const at::Tensor& tensor) {
  c10::StorageImpl& storage = *tensor.storage().unsafeGetStorageImpl();
  const std::size_t bytes = static_cast<std::size_t>(tensor.numel()) * tensor.element_size();
  if (tensor.is_cpu() && bytes >= kLargeBytes) {
    auto block = std::make_unique<Block>(take_block(bytes));
    void* const data = block->data;
    const auto give = [](void* context) {
      const std::unique_ptr<Block> given(static_cast<Block*>(context));
      give_back(*given);
    };
    storage.set_data_ptr_noswap(c10::DataPtr(data, block.release(), give, storage.device()));
  } else {
    storage.set_data_ptr_noswap(storage.allocator()->allocate(bytes));
  }
  storage.set_nbytes(bytes);
}

at::Tensor empty_flat(std::int64_t numel, const at::TensorOptions& options) {
  const std::size_t bytes = static_cast<std::size_t>(numel) * options.dtype().itemsize();
  if (!options.device().is_cpu() || bytes < kLargeBytes) return at::empty({numel}, options);
  const Block block = take_block(bytes);
  return at::from_blob(
      block.data, {numel}, [block](void*) { give_back(block); }, options);
}

void return_free_memory() {
#ifdef __GLIBC__
  // Only of glibc's own heap: where another has taken its place (jemalloc, a sanitizer), this would begin one.
  Dl_info malloc_info, trim_info;
  const bool has_both = ::dladdr(::dlsym(RTLD_DEFAULT, "malloc"), &malloc_info) != 0 &&
                        ::dladdr(::dlsym(RTLD_DEFAULT, "malloc_trim"), &trim_info) != 0;
  if (has_both && malloc_info.dli_fbase == trim_info.dli_fbase) ::malloc_trim(0);
#endif
}

}  // namespace tessera::fsdp
