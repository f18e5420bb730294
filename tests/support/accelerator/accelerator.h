#pragma once
// A simulated accelerator, for tests without one: eight devices "sim:0" to "sim:7" of the kind PrivateUse1, whose
// memory the host cannot touch and whose work runs late. It makes mistakes of asynchronous programs visible that a CPU
// hides:
//
//   the host reads or writes memory of a device        a segmentation fault
//   a stream does not wait for what produced its input wrong values, in one of the two orders below
//   memory is freed while another stream uses it       wrong values, in one of the two orders
//   memory is read before it is written                NaN: fresh and freed memory is filled with bytes 0xFF
//   the host waits for a device where it need not      a count of `synchronizations`
//
// Laws:
// - A call on a device enqueues a task on the current stream and returns. Tasks of a stream run in the order of their
// calls; tasks of
//   different streams are ordered by events alone. A task holds addresses, not tensors.
// - Every task computes with LibTorch's CPU kernels, so results equal the CPU's bit for bit.
// - Tasks run in a thread that synchronizes, one at a time for all devices (engine.h).
// - Memory follows the rules of CUDA's caching allocator (allocator.h).
//
// Ranks are threads of one process, each with a device of its own (collectives.h). Current devices and streams belong
// to a thread. All functions may be called from any thread. Memory of a device is shared with processes forked after
// its first use, so a process that forks ranks must not use a device before.

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace tessera::sim {

inline constexpr int kDevices = 8;

// Registers the kind of device with LibTorch, once in a process. Call it before the first backward of the process, and
// before threads use the device.
void install();

// Returns the device "sim:<index>".
c10::Device device(int index);

// Which tasks run if several may.
//
//   late   Only the tasks that a synchronization depends on. A stream that does not wait for the producer of its input
//   reads what was
//          in memory before.
//   early  A stream other than the default one runs as soon as something is enqueued on it, up to an event that it
//   waits for; then the
//          tasks before the event run as well. A side stream that does not wait for the current stream overtakes it.
//
// At first it is TESSERA_SIM_ORDER of the environment, or late. Change it only if no task is enqueued.
enum class Order { late, early };
void set_order(Order order);
Order order();

// How often the host waited for a device.
struct Synchronizations {
  std::int64_t event = 0, stream = 0, device = 0;
  std::int64_t copy_to_host = 0;  // blocking, or into memory that is not pinned
  std::int64_t item = 0;          // item(), equal() and other ops that return no tensor
  std::int64_t total() const { return event + stream + device + copy_to_host + item; }
};
Synchronizations synchronizations(int device);
void reset_synchronizations(int device);

// Memory of a device in bytes, each allocation being rounded up to a multiple of 512.
struct MemoryStatistics {
  std::size_t allocated_bytes = 0;  // now
  std::size_t peak_bytes = 0;       // most since reset_peak()
  std::int64_t allocations = 0;     // calls since the process began
};
MemoryStatistics memory_statistics(int device);
void reset_peak(int device);

// A task that ran.
struct TraceEntry {
  int device = 0;
  std::int64_t stream = 0;  // 0 is the default stream
  // Of the op, "aten::add.out"; or "copy", "poison", "record", "wait", "note" or a collective's, "nccl:all_gather".
  std::string name;
  std::int64_t point = 0;    // the number, from 1 on, of what "record" reaches and "wait" waits for
  std::int64_t meeting = 0;  // the number, from 1 on, of the collective, which all its ranks share
  std::int64_t bytes = 0;    // of arguments and results; of a collective, those that a rank sends in a ring
  std::int64_t flops = 0;    // of products of matrices
  std::string text = {};     // of a note
  friend bool operator==(const TraceEntry&, const TraceEntry&) = default;
};
// Starts to list the tasks that run. Until take_trace(), points that are reached already are recorded and waited for as
// well. So if no task is enqueued now, the trace has all that orders its tasks.
void start_trace();
// Adds the text to the trace, at the end of the current stream. Does nothing if there is no trace.
void note(const std::string& text);
// Returns the tasks that ran since start_trace(), in their order, and stops.
std::vector<TraceEntry> take_trace();

// Returns how many events were destroyed by threads of which this was the current device. On CUDA, that initializes the
// device: it costs hundreds of MiB of its memory if the thread's rank uses another one.
std::int64_t destroyed_events(int device);

// Seeds the generators of all devices. After this and torch::manual_seed(seed), a device draws what the CPU draws.
// LibTorch 2.6 does not seed devices of this kind in torch::manual_seed.
void manual_seed(std::uint64_t seed);

}  // namespace tessera::sim
