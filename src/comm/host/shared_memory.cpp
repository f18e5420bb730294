#include "tessera/comm/internal/shared_memory.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <fcntl.h>
#include <pthread.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <map>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <utility>
#include <vector>

#include "comm/group_impl.h"
#include "comm/host/backend.h"
#include "tessera/base/function_ref.h"

namespace tessera::comm {

namespace {

constexpr char kAllocate[] = "allocate shared memory";

HostBackend* backend_of(const ProcessGroup::Impl& group) {
  return dynamic_cast<HostBackend*>(group.transports.control.backend.get());
}

// Memory in this process. The descriptor is closed when each rank has what it needs.
struct Allocation {
  Allocation() = default;
  Allocation(Descriptor memory_in, std::size_t size_bytes)
      : memory(std::make_shared<Descriptor>(std::move(memory_in))),
        mapping(std::make_shared<Mapping>(*memory, 0, size_bytes)) {}
  std::shared_ptr<Descriptor> memory;
  std::shared_ptr<Mapping> mapping;
};

// Allocations of rank 0 for the threads of its process, by the group's memory.
std::map<const void*, Allocation>& handed_over() {
  static auto& allocations = *new std::map<const void*, Allocation>;
  return allocations;
}
std::mutex& handed_over_mutex() {
  static auto& mutex = *new std::mutex;
  return mutex;
}

class HandingOver {
 public:
  HandingOver(const void* identity, const Allocation& allocation) : identity_(identity) {
    const std::lock_guard<std::mutex> lock(handed_over_mutex());
    handed_over()[identity_] = allocation;
  }
  HandingOver(const HandingOver&) = delete;
  HandingOver& operator=(const HandingOver&) = delete;
  ~HandingOver() {
    const std::lock_guard<std::mutex> lock(handed_over_mutex());
    handed_over().erase(identity_);
  }

 private:
  const void* identity_;
};

bool all_are(const GroupPtr& group, bool mine) {
  const at::Tensor in = at::empty({1}, at::kLong), out = at::empty({group->size()}, at::kLong);
  in.data_ptr<std::int64_t>()[0] = mine ? 1 : 0;
  start_all_gather(group, group->transports.control, kAllocate, out, in, /*is_counted=*/false).wait();
  const auto* const all = out.data_ptr<std::int64_t>();
  return std::all_of(all, all + group->size(), [](std::int64_t each) { return each == 1; });
}

bool succeeds(FunctionRef<void()> step) {
  try {
    step();
    return true;
  } catch (const std::exception&) {  // the caller uses memory of its own
    return false;
  }
}

}  // namespace

SharedMemoryView::SharedMemoryView(const Descriptor& memory, std::size_t size_bytes) : size_bytes_(size_bytes) {
  void* const data =
      ::mmap(nullptr, size_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_NORESERVE, memory.number(), 0);
  if (data == MAP_FAILED) throw std::bad_alloc();
  data_ = static_cast<std::uint8_t*>(data);
}

SharedMemoryView::~SharedMemoryView() { ::munmap(data_, size_bytes_); }

namespace {

// As pm_scan_arg of linux/fs.h, since 6.7.
struct ScanArguments {
  std::uint64_t size, flags, start, end, walk_end, vec, vec_len, max_pages, category_inverted, category_mask,
      category_anyof_mask, return_mask;
};
struct ScannedRegion {
  std::uint64_t start, end, categories;
};
constexpr std::uint64_t kScanFile = 1u << 2, kScanPresent = 1u << 3, kScanSwapped = 1u << 4;
constexpr unsigned long kScan = _IOWR('f', 16, ScanArguments);

// Returns a descriptor of this process's pages. A child has pages of its own.
int pagemap() {
  static std::atomic<int> file;
  static const auto open_own = [] { file = ::open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC); };
  static std::once_flag once;
  std::call_once(once, [] {
    open_own();
    ::pthread_atfork(nullptr, nullptr, [] {
      ::close(file);
      open_own();
    });
  });
  return file;
}

// Returns whether some page of a private mapping of a file is a copy, nothing if this kernel does not tell at once.
std::optional<bool> scan_for_copies(const std::uint8_t* data, std::size_t size_bytes) {
  ScannedRegion found{};
  ScanArguments scan{};
  scan.size = sizeof(scan);
  scan.start = reinterpret_cast<std::uintptr_t>(data);
  scan.end = scan.start + size_bytes;
  scan.vec = reinterpret_cast<std::uintptr_t>(&found);
  scan.vec_len = scan.max_pages = 1;
  scan.category_inverted = scan.category_mask = kScanFile;
  scan.category_anyof_mask = kScanPresent | kScanSwapped;
  scan.return_mask = kScanFile;
  const int regions = ::ioctl(pagemap(), kScan, &scan);
  return regions < 0 ? std::nullopt : std::optional(regions > 0);
}

// The same for any kernel. If nothing is known of a page, it may be a copy.
bool has_copies(const std::uint8_t* data, std::size_t size_bytes) {
  constexpr std::uint64_t kIsPresent = std::uint64_t{1} << 63, kIsSwapped = std::uint64_t{1} << 62,
                          kIsOfFile = std::uint64_t{1} << 61;
  const std::size_t first = reinterpret_cast<std::uintptr_t>(data) / page_bytes(),
                    end = first + size_bytes / page_bytes();
  std::array<std::uint64_t, 512> entries;
  for (std::size_t page = first; page < end; page += entries.size()) {
    const std::size_t count = std::min(entries.size(), end - page);
    const ssize_t wanted = static_cast<ssize_t>(count * sizeof(std::uint64_t));
    const auto offset = static_cast<off_t>(page * sizeof(std::uint64_t));
    if (::pread(pagemap(), entries.data(), static_cast<std::size_t>(wanted), offset) != wanted) return true;
    for (std::size_t i = 0; i < count; ++i) {
      if ((entries[i] & (kIsPresent | kIsSwapped)) != 0 && (entries[i] & kIsOfFile) == 0) return true;
    }
  }
  return false;
}

}  // namespace

// A page that was written to is a copy, and no longer one of the file. To drop all pages would cost as many page
// faults, so the kernel is asked first.
void SharedMemoryView::drop_writes() noexcept {
  const std::optional<bool> scanned = scan_for_copies(data_, size_bytes_);
  if (scanned ? *scanned : has_copies(data_, size_bytes_)) ::madvise(data_, size_bytes_, MADV_DONTNEED);
}

bool SharedMemory::is_available(const ProcessGroup& group) {
  return group.size() > 1 && backend_of(*group.impl_) != nullptr;
}

std::shared_ptr<SharedMemory> SharedMemory::make(const ProcessGroup& group, std::size_t size_bytes, bool wants_it) {
  group.check_call(kAllocate, [&](CallArguments& arguments) { arguments.add("bytes", size_bytes); });
  const GroupPtr& impl = group.impl_;
  const Host& host = backend_of(*impl)->engine()->host();
  const std::size_t in_pages = std::max((size_bytes + page_bytes() - 1) / page_bytes(), std::size_t{1}) * page_bytes();
  Allocation allocation;
  std::optional<HandingOver> handing_over;  // until this call ends, by a return or an exception
  const auto allocate = [&] {
    allocation = Allocation(make_shared_memory(in_pages), in_pages);
    handing_over.emplace(host.identity(), allocation);
  };
  bool is_good = all_are(impl, wants_it && (host.rank() != 0 || succeeds(allocate)));
  auto memory = std::make_shared<SharedMemory>();
  const auto share = [&] {
    if (host.rank() == 0) {
      std::exception_ptr failure;  // if one of them is dead, the others must not wait
      for (const Descriptor& socket : host.sockets()) {
        try {
          if (socket.is_open()) send_descriptor(socket, *allocation.memory);
        } catch (const std::exception&) {
          failure = std::current_exception();
        }
      }
      if (failure) std::rethrow_exception(failure);
    } else if (host.sockets().empty()) {
      const std::lock_guard<std::mutex> lock(handed_over_mutex());
      allocation = handed_over().at(host.identity());
    } else {
      const auto check = [&] {
        if (const std::string why = impl->liveness->failure(); !why.empty()) throw std::runtime_error(why);
      };
      allocation = Allocation(receive_descriptor(host.sockets()[0], {group.timeout(), check}), in_pages);
    }
    memory->mapping_ = allocation.mapping;
    memory->view_ = std::make_shared<SharedMemoryView>(*allocation.memory, in_pages);
  };
  is_good = is_good && all_are(impl, succeeds(share));
  return is_good ? memory : nullptr;
}

at::Tensor SharedMemory::tensor(std::size_t offset_bytes, std::int64_t numel, at::ScalarType dtype) const {
  return at::from_blob(
      mapping_->data() + offset_bytes, {numel}, [kept = mapping_](void*) {}, at::TensorOptions().dtype(dtype));
}

namespace {

PendingCollective begin(const GroupPtr& group, std::string_view name,
                        FunctionRef<WorkPtr(HostBackend& backend)> start) {
  return ProcessGroup::Impl::begin(group, name, group->transports.control, at::kCPU,
                                   [&](Backend& backend) { return start(static_cast<HostBackend&>(backend)); });
}

}  // namespace

PendingCollective SharedMemory::start_reduce_scatter(const ProcessGroup& group, const at::Tensor& out,
                                                     const std::vector<Piece>& pieces, ReduceOp op) {
  const std::size_t part_bytes = out.nbytes();
  std::vector<MemoryPieces> parts(1);
  std::vector<at::Tensor> kept;
  std::size_t in_part = 0;
  for (const Piece& piece : pieces) {
    MemoryPiece left{nullptr, static_cast<std::size_t>(piece.numel) * out.element_size()};
    const at::Tensor& tensor =
        kept.emplace_back(piece.tensor.defined() ? piece.tensor.resolve_conj().resolve_neg() : piece.tensor);
    if (tensor.defined()) left.data = static_cast<std::uint8_t*>(tensor.data_ptr());
    while (left.size_bytes > 0) {
      if (in_part == part_bytes) {
        parts.emplace_back();
        in_part = 0;
      }
      const std::size_t size_bytes = std::min(left.size_bytes, part_bytes - in_part);
      parts.back().push_back({left.data, size_bytes});
      if (left.data != nullptr) left.data += size_bytes;
      left.size_bytes -= size_bytes;
      in_part += size_bytes;
    }
  }
  return start_reduce_scatter(group, out, std::move(parts), std::move(kept), op);
}

PendingCollective SharedMemory::start_reduce_scatter(const ProcessGroup& group, const at::Tensor& out,
                                                     std::vector<MemoryPieces> parts, std::vector<at::Tensor> kept,
                                                     ReduceOp op) {
  check_reduction(*group.impl_, "reduce_scatter_into", out, op);
  return begin(group.impl_, "reduce_scatter_into", [&](HostBackend& backend) {
    return backend.start_reduce_scatter(out, std::move(parts), std::move(kept), op);
  });
}

PendingCollective SharedMemory::start_all_reduce(const ProcessGroup& group, const at::Tensor& out, const at::Tensor& in,
                                                 ReduceOp op) {
  check_reduction(*group.impl_, "all_reduce", out, op);
  return begin(group.impl_, "all_reduce", [&](HostBackend& backend) { return backend.start_all_reduce(out, in, op); });
}

PendingCollective SharedMemory::start_all_to_all(const ProcessGroup& group, std::vector<MemoryPieces> outs,
                                                 std::vector<MemoryPieces> ins, std::vector<at::Tensor> kept) {
  return begin(group.impl_, "all_to_all",
               [&](HostBackend& backend) { return backend.start_all_to_all(outs, ins, std::move(kept)); });
}

PendingCollective SharedMemory::start_meeting(const ProcessGroup& group, std::string_view name, bool is_counted) {
  const GroupPtr& impl = group.impl_;
  if (impl->is_alone()) return {};
  return ProcessGroup::Impl::begin(
      impl, name, impl->transports.control, at::kCPU,
      [](Backend& backend) { return backend.barrier(::c10d::BarrierOptions()); }, {}, is_counted);
}

}  // namespace tessera::comm
