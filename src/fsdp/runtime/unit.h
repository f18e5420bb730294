#pragma once
// A part of a model that is sharded by itself, and what is under way in it.

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "fsdp/autograd.h"
#include "tessera/fsdp/flat_param_handle.h"
#include "tessera/fsdp/wrap.h"

namespace tessera::fsdp {

class Runtime;

// The nodes in which a forward's gradients end. The same from forward to forward, unless the parameters change dtype
// when they become whole.
struct Accumulators {
  std::vector<std::size_t> params;  // of the handle
  std::vector<Accumulator> nodes;   // one each
  std::size_t waiting = 0;          // of how many the gradient hasn't come yet in this backward
  bool tells_end = true;            // whether nothing of the unit is needed once all gradients have come
  std::uint64_t backward = 0;       // in which they are waited for
};

// One call of forward whose result has a gradient.
struct Call {
  Unit& unit;
  std::uint64_t first;  // when the unit was first called in the same forward, by the runtime's clock
  std::uint64_t begin, end = 0;
  std::shared_ptr<Accumulators> accumulators;
  std::uint64_t backward = 0;  // in which it was reached last
};

class Unit {
 public:
  // `handle` is null for a model all of whose parameters are in units within it.
  Unit(Runtime& runtime, std::string name, std::unique_ptr<FlatParamHandle> handle, Wrappable* module);
  ~Unit();
  Unit(const Unit&) = delete;
  Unit& operator=(const Unit&) = delete;

  Runtime& runtime() const { return runtime_; }
  const std::string& name() const { return name_; }
  FlatParamHandle* handle() const { return handle_.get(); }

  // Those of the parameters as they are, which is whole; null if none needs a gradient.
  std::shared_ptr<Accumulators> accumulators();
  // Whether all gradients of what a backward has reached have come.
  bool is_done() const;

  // --- in a backward

  std::vector<std::shared_ptr<Call>> open_calls;  // reached, and not known to have ended
  std::int64_t calls_ahead = 0;                   // of forward, not reached yet
  std::uint64_t first_call = 0;                   // of the forward that was begun last
  std::uint64_t prepared_in = 0;                  // the backward for which the gradient was set aside

 private:
  // Outlives the unit in the hooks.
  struct Link {
    Unit* unit;
  };
  void on_gradient(Accumulators& accumulators, std::size_t param);

  Runtime& runtime_;
  std::string name_;
  std::unique_ptr<FlatParamHandle> handle_;
  Wrappable* module_;
  std::shared_ptr<Link> link_ = std::make_shared<Link>(Link{this});
  std::shared_ptr<Accumulators> accumulators_;  // the latest
};

}  // namespace tessera::fsdp
