// The part of FlatParamHandle that concerns memory which the ranks of a host share.

#include "tessera/comm/internal/shared_memory.h"
#include "fsdp/flat_param/storage.h"
#include "tessera/base/crc32.h"
#include "tessera/fsdp/flat_param_handle.h"

namespace tessera::fsdp {

// Returns memory for the unsharded flat parameter that the ranks share, null if they cannot.
std::shared_ptr<comm::SharedMemory> FlatParamHandle::make_host_memory() const {
  if (!is_sharded(options_.strategy) || !comm::SharedMemory::is_available(group_)) return nullptr;
  const bool can_share = options_.device.is_cpu() && !switches_.fakes_all_gather;
  const auto numel = static_cast<std::size_t>(layout_.padded_unsharded_numel());
  return comm::SharedMemory::make(group_, numel * c10::elementSize(compute_dtype_), can_share);
}

// Returns this rank's part of that memory.
at::Tensor FlatParamHandle::part_of(const comm::SharedMemory& host) const {
  const std::int64_t numel = layout_.sharded_numel();
  const std::size_t offset_bytes = static_cast<std::size_t>(shard_rank() * numel) * c10::elementSize(compute_dtype_);
  return host.tensor(offset_bytes, numel, compute_dtype_);
}

// The parameters are gathered when all ranks have written their shards.
void FlatParamHandle::start_unshard_in_host_memory() {
  const std::shared_ptr<comm::SharedMemoryView>& view = unsharded_->host->view();
  if (!has_shard_in_host_memory()) part_of(*unsharded_->host).copy_(flat_param_.detach());
  unsharded_->gathering = comm::SharedMemory::start_meeting(group_, "all_gather_into", /*is_counted=*/true);
  set_storage(unsharded_->flat, view->data(), view);
  unsharded_->is_gathered = true;
  unsharded_->versions = versions();
}

bool FlatParamHandle::has_shard_in_host_memory() const {
  return computing_.host != nullptr && compute_dtype_ == flat_param_.scalar_type();
}

bool FlatParamHandle::meet_after_reshard() {
  if (computing_.host == nullptr) return false;
  comm::SharedMemory::start_meeting(group_, "reshard", /*is_counted=*/false).wait();
  return true;
}

std::uint32_t FlatParamHandle::shard_checksum() const {
  return crc32({static_cast<const std::uint8_t*>(flat_param_.data_ptr()), flat_param_.nbytes()});
}

}  // namespace tessera::fsdp
